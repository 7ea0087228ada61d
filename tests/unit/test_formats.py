"""Words that stand on disk and on the wire: older runs, servers and scripts hold them, so none may change.

What is found comes from a real run; what it is compared with are literals. A word may be added, with its row here:
readers take what they know. One that goes or changes needs a reader of the old one first.
"""

import json
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.fork_server import start_supervisor
from support.golden_run import Documents, documents_of, instances_in, live

import midstride.engine
from midstride.engine import Callback, EarlyStopping, TrainingModule, errors
from midstride.engine.objects.object_state import Objects
from midstride.engine.seeds import mix
from midstride.engine.session.attempts import Attempt
from midstride.engine.session.events import Event
from midstride.engine.session.outcome import Outcome
from midstride.engine.state.codec import decode, encode
from midstride.engine.state.object_nodes import Instance, Same, View
from midstride.engine.state.row_shards import RowShard
from midstride.flows.cli import app

SOURCES = Path(midstride.engine.__file__).resolve().parents[1]

# --- what a run leaves ----------------------------------------------------------------------------------------------

#: document, and the path in it: its words
WORDS = {
    "files": """
        _champions/golden/000001.json
        _champions/golden/weights/run/manifest.json
        _champions/golden/weights/run/model.json
        _champions/golden/weights/run/model.safetensors
        failed
        run/job.json run/attempts/000001.json run/attempts/000001.log run/attempts/000002.json run/attempts/000002.log
        run/best/000000000004.0002-g000002/manifest.json
        run/best/000000000004.0002-g000002/model.json
        run/best/000000000004.0002-g000002/model.safetensors
        run/last/000000000008.0004-g000002/manifest.json
        run/last/000000000008.0004-g000002/model.json
        run/last/000000000008.0004-g000002/model.safetensors
        run/lease/000001.json run/lease/000002.json
        run/metrics/000000000002-g000001.CHECKSUM.CHECKSUM.csv
        run/metrics/000000000004-g000001.CHECKSUM.CHECKSUM.csv
        run/metrics/000000000004.0002-g000001.CHECKSUM.CHECKSUM.csv
        run/metrics/000000000006-g000002.CHECKSUM.CHECKSUM.csv
        run/metrics/000000000008-g000002.CHECKSUM.CHECKSUM.csv
        run/metrics.csv run/run.json
        run/snapshots/000000000008.0002-g000002/aside.json
        run/snapshots/000000000008.0002-g000002/manifest.json
        run/snapshots/000000000008.0002-g000002/metrics.csv
        run/snapshots/000000000008.0002-g000002/rank-00000-of-00001.json
        run/snapshots/000000000008.0002-g000002/rank-00000-of-00001.safetensors
        run/snapshots/000000000008.0004-g000002/manifest.json
        run/snapshots/000000000008.0004-g000002/metrics.csv
        run/snapshots/000000000008.0004-g000002/rank-00000-of-00001.json
        run/snapshots/000000000008.0004-g000002/rank-00000-of-00001.safetensors""",
    "run.json": "run identity bits text_hash constants kinds settings in_force",
    "run.json/identity": """
        module module_args data data_args weights seed samples shuffle drop_last global_batch_size
        accumulate_grad_batches gradient_clip_val gradient_clip_algorithm val_check_interval check_val_every_n_epoch
        limit_train_batches limit_val_batches use_distributed_sampler rng precision strategy""",
    "run.json/bits": "threads cpu machine gpu cuda deterministic python torch numpy source compiled",
    "lease.json": "generation resumed_from run_id ancestors facts time nonce checksum",
    "lease.json/facts": "host pid boot namespace began session",
    "attempts.json": """
        number outcome code type error step rank generation resumed_from resumed_step snapshot started ended
        first_step_at slow ended_by why""",
    "aside.json": "reason time",
    "metrics.csv": "epoch step train/loss train/loss_step val/error",
    # a snapshot
    "manifest.json": """
        format run run_id step after generation resumed_from ancestors world_size files facts time checksum""",
    "manifest.json/files": "rank-00000-of-00001.safetensors rank-00000-of-00001.json metrics.csv",
    "manifest.json/files/metrics.csv": "bytes xxh3_128",
    "manifest.json/facts/progress": """
        epoch earlier_batches skipped batch step after in_epoch at_end validated validating val_loader val_batch stop
        finished ended_by why""",
    "manifest.json/facts": """
        identity bits text_hash constants kinds settings in_force start strategy progress left_out row_times weights
        weights_facts""",
    "manifest.json/facts/start": "size batch_size validation",
    "manifest.json/facts/weights": "best",
    "manifest.json/facts/weights_facts": "best last",
    "manifest.json/facts/weights_facts/best": "step epoch module hparams hparams_left_out metrics monitors",
    "rank-00000-of-00001.json": "format elsewhere blocks tree",
    # its parts
    "rank-00000-of-00001.json/tree": """
        strategy progress samples feeds structure module optimizers schedulers precision callbacks logged metrics
        gradients modes buffers objects user generators""",
    "rank-00000-of-00001.json/tree/samples": "stretches left_out",
    "rank-00000-of-00001.json/tree/feeds": "training validation",
    "rank-00000-of-00001.json/tree/feeds/training": "begun sampler random_collate",
    "rank-00000-of-00001.json/tree/callbacks": "BestCheckpoint EarlyStopping",
    "rank-00000-of-00001.json/tree/callbacks/BestCheckpoint": "best best_step monitor mode",
    "rank-00000-of-00001.json/tree/callbacks/EarlyStopping": "best wait_count best_epoch stopped_epoch monitor mode",
    "rank-00000-of-00001.json/tree/logged": "rows values names evaluation_values running evaluated steps paths",
    "rank-00000-of-00001.json/tree/logged/rows": "open pending pending_shares",
    "rank-00000-of-00001.json/tree/logged/paths": "train evaluate",
    "rank-00000-of-00001.json/tree/metrics": "metrics groups",
    "rank-00000-of-00001.json/tree/metrics/metrics/error": "states attributes updates",
    "rank-00000-of-00001.json/tree/modes": "training requires_grad",
    "rank-00000-of-00001.json/tree/buffers": "cache",
    "rank-00000-of-00001.json/tree/objects": "module data optimizers built",
    "rank-00000-of-00001.json/tree/objects/data": "training validation~0",
    "rank-00000-of-00001.json/tree/generators": "torch cuda numpy random",
    # weights
    "best": """
        format run run_id step after generation resumed_from ancestors world_size files facts time checksum""",
    "best/files": "model.safetensors model.json",
    "best/facts": "step epoch module hparams hparams_left_out metrics monitors",
    "best/facts/monitors/0": "monitor mode",
    "golden.json": "number run module module_args before decision time nonce checksum",
    "golden.json/decision": "promoted why metric mode margin challenger champion over gates failed_gates",
    # a session
    "job.json": "run attempt started job",
    "outcome-rank-00000.json": "kind error type rank step time is_refusal",
    "events": "imported met started resumed step snapshot validation finished",
    "events/started": "epoch generation step steps_total",
    "events/resumed": "generation resumed_from step",
    "events/step": "batch batches epoch loss metrics rate step steps_total",
    "events/snapshot": "bytes epoch name stall_s step wait_s write_s",
    "events/validation": "epoch metrics step",
    "events/finished": "epoch step ended_by why",
}


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Documents:
    folder = tmp_path_factory.mktemp("golden")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("midstride.engine.processes.supervised_process.start_supervisor", start_supervisor)
        said = live(folder)
    return {**documents_of(folder), **said}


@pytest.mark.parametrize("where", WORDS)
def test_a_run_is_written_in_these_words(documents: Documents, where: str) -> None:
    name, *steps = where.split("/")
    found: Any = documents[name]
    for step in steps:
        found = found[int(step) if step.isdigit() else step]
    assert {str(word).replace(" ", "~") for word in found} == set(WORDS[where].split())


def test_the_format_is_3(documents: Documents) -> None:
    assert {documents[name]["format"] for name in ("manifest.json", "rank-00000-of-00001.json", "best", "last")} == {3}


def test_objects_have_these_forms_and_kinds(documents: Documents) -> None:
    assert instances_in(documents["rank-00000-of-00001.json"]["tree"]["objects"]) == {
        "count": "itertools:count",
        "cursor": "builtins:list_iterator",
        "dict": "collections:defaultdict",
        "enum": "golden_model:Color",
        "function": "golden_model:double",
        "generator": "torch._C:Generator",
        "large": "builtins:list",
        "method": "midstride.engine:TrainingModule.log",
        "named tuple": "golden_model:Point",
        "object": "golden_model:Part",
        "opaque": "midstride.engine:EarlyStopping",
        "partial": "functools:partial",
        "set": "builtins:set",
        "value": "builtins:range",
    }


# --- values ---------------------------------------------------------------------------------------------------------

#: a value of each type with a tag, and its document
VALUES: list[tuple[Any, Any]] = [
    (float("inf"), {"$": "float", "value": "inf"}),
    (1 + 2j, {"$": "complex", "items": [1.0, 2.0]}),
    (b"a", {"$": "bytes", "value": "YQ=="}),
    (bytearray(b"a"), {"$": "bytearray", "value": "YQ=="}),
    ((1,), {"$": "tuple", "items": [1]}),
    ({1}, {"$": "set", "items": [1]}),
    (frozenset({1}), {"$": "frozenset", "items": [1]}),
    (deque([1], 2), {"$": "deque", "maxlen": 2, "items": [1]}),
    ({1: 2}, {"$": "dict", "pairs": [[1, 2]]}),
    (OrderedDict(a=1), {"$": "OrderedDict", "pairs": [["a", 1]]}),
    (Counter("a"), {"$": "Counter", "pairs": [["a", 1]]}),
    (defaultdict(int), {"$": "defaultdict", "factory": "int", "pairs": []}),
    (torch.Size([1]), {"$": "Size", "value": [1]}),
    (torch.bfloat16, {"$": "dtype", "value": "bfloat16"}),
    (torch.device("cpu"), {"$": "device", "value": "cpu"}),
    (np.float32(1), {"$": "scalar", "dtype": "<f4", "bytes": "0000803f"}),
    (Same("a"), {"$": "same", "as": "a"}),
    (View("a", (1,), (1,), 0), {"$": "view", "of": "a", "shape": [1], "strides": [1], "offset": 0}),
    (Instance("object", "m:A", {}), {"$": "instance", "form": "object", "kind": "m:A", "state": {}}),
]
#: a value that is written as a tensor, and the keys of its document
TENSORS: list[tuple[Any, str]] = [
    (torch.ones(2), "$ dtype name shape"),
    (torch.nn.Parameter(torch.ones(2)), "$ dtype name parameter requires_grad shape"),
    (torch.ones(2, 3).t(), "$ dtype name shape strides"),
    (torch.eye(2).to_sparse(), "$ coalesced indices shape values"),
    (np.ones(2), "$ data dtype order shape"),
    (RowShard(torch.ones(1, 2), 0, (2, 2)), "$ rows shape start"),
]


@pytest.mark.parametrize(("value", "document"), VALUES, ids=lambda value: type(value).__name__)
def test_a_value_is_written_so(value: Any, document: Any) -> None:
    assert encode(value).document == document


@pytest.mark.parametrize(("value", "keys"), TENSORS, ids=lambda value: type(value).__name__)
def test_a_tensor_is_written_so(value: Any, keys: str) -> None:
    assert sorted(encode({"x": value}).document["x"]) == keys.split()


# --- how a world ends -----------------------------------------------------------------------------------------------

#: kind of outcome: its exit code
CODES = {"done": 0, "stopped": 75, "user_error": 2, "died": 1}
#: error: its exit code, and the kind of outcome it makes
ERRORS = {
    "EngineError": (1, "died"),
    "UserError": (2, "user_error"),
    "JobError": (2, "user_error"),
    "UserCodeError": (2, "user_error"),
    "NotExact": (2, "user_error"),
    "UnsupportedState": (2, "user_error"),
    "IdentityChanged": (2, "user_error"),
    "LossNotFinite": (2, "user_error"),
    "NoLoss": (2, "user_error"),
    "StrategyUnavailable": (2, "user_error"),
    "RunHeld": (2, "user_error"),
    "StopRequested": (75, "stopped"),
    "ReplayEnd": (75, "stopped"),
    "Superseded": (75, "stopped"),
    "Overtaken": (1, "died"),
    "WorldError": (1, "died"),
    "SnapshotError": (1, "died"),
    "SnapshotMissing": (1, "died"),
    "SnapshotDamaged": (1, "died"),
    "SnapshotUnreadable": (1, "died"),
    "ReadBackDiffers": (2, "died"),
    "StoreFull": (1, "died"),
    "StoreSilent": (1, "died"),
    "StoreUnsafe": (2, "died"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_has_this_type_code_and_kind(name: str) -> None:
    error: type[errors.EngineError] = getattr(errors, name)
    code, kind = ERRORS[name]
    outcome = Outcome.of(error("why"))
    assert (outcome.type, outcome.kind, outcome.code) == (f"midstride.engine.errors.{name}", kind, CODES[kind])
    assert error.exit_code == code


def test_an_attempt_hears_these_events() -> None:
    attempt = Attempt(1)
    for kind, fields in {
        "started": {"step": 2, "generation": 3},
        "resumed": {"generation": 3, "resumed_from": "000000000002-g000002", "step": 2},
        "step": {"step": 3},
        "snapshot": {"step": 4, "name": "000000000004-g000003"},
        "slow": {"rank": 1, "words": "rank 1 is slow"},
    }.items():
        attempt = attempt.after(Event(kind, 5.0, fields))
    assert attempt == Attempt(
        *(1, "lost", 1, "", "", 4, 0, 3, "000000000002-g000002", 2, "000000000004-g000003"),
        first_step_at=5.0,
        slow=("rank 1 is slow",),
    )


# --- what scripts say -----------------------------------------------------------------------------------------------


def test_the_environment_has_these_variables() -> None:
    files = [path for part in ("engine", "tasks", "flows") for path in (SOURCES / part).rglob("*.py")]
    assert {word for path in files for word in re.findall(r"MIDSTRIDE_[A-Z_]+", path.read_text())} == {
        "MIDSTRIDE_ASKS_RANKS",
        "MIDSTRIDE_FAULTS",
        "MIDSTRIDE_GRACE_S",
        "MIDSTRIDE_MEETING",
        "MIDSTRIDE_PARENT",
        "MIDSTRIDE_REPLAY",
        "MIDSTRIDE_ROUND",
        "MIDSTRIDE_SECRET",
        "MIDSTRIDE_SESSION",
        "MIDSTRIDE_STARTED",
    }


def test_the_command_line_has_these_commands() -> None:
    words = (
        "fit check prepare status evaluate test predict compare audit snapshots champion runs report export init "
        "schema rank join train nightly deploy serve setup-server fork replay verify diff"
    )
    inner = {"champion": "list show rollback", "snapshots": "list verify prune repair"}
    assert _commands(app) == set(words.split())
    for name, words in inner.items():
        assert _commands(app[name]) == set(words.split())


def _commands(commands: Any) -> set[str]:
    return {name for name in commands if not name.startswith("-")}


# --- classes of the engine that a user's module keeps ---------------------------------------------------------------


class Keeping(TrainingModule):
    """Keeps things of the engine's in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.stopper = EarlyStopping("loss")
        self.kind = EarlyStopping
        self.write = self.log
        self.hash: Callable[..., int] = mix
        self.several = [mix, EarlyStopping("loss"), Callback()]
        self.inner = [TrainingModule()]


def test_a_class_of_the_engine_is_named_without_its_module(caplog: pytest.LogCaptureFixture) -> None:
    trained, resumed = Keeping(), Keeping()
    objects = Objects.of_module(trained), Objects.of_module(resumed)
    trained.inner[0].hparams["width"] = 3
    caplog.clear()
    encoded = encode(objects[0].state_dict())
    for name in ("EarlyStopping", "Callback", "TrainingModule", "TrainingModule.log", "mix"):
        assert f'"midstride.engine:{name}"' in json.dumps(encoded.document)
    objects[1].load_state_dict(decode(encoded.document, encoded.tensors))
    assert resumed.inner[0].hparams == {"width": 3}
    assert caplog.messages == []
