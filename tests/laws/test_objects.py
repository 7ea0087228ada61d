"""Law 1 for what is no weight: a life that goes on from a snapshot has every object as it was, shared as it was."""

import gc
import importlib
import logging
import os
import re
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from laws.mended import MENDED
from laws.objects.devices import ON_DEVICE
from laws.objects.every_row import KEPT, NAMED
from laws.objects.loaders import Levelled, TellsBetweenEpochs
from laws.objects.ranked import CUT, RANKED, STEPS, train, train_ranked
from laws.objects.structure import DropsInValidation
from laws.objects.together import train_logged, train_together
from laws.xla_world import STAND_IN, run_xla_ranks
from support.hostile_files import Parts

from midstride.engine.errors import UserError
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.state.differences import differences
from midstride.engine.testing import final_state, run_ranks

for module in ("torch._dynamo", "torch.profiler._cupti_monitor", "support.huge_pages"):
    importlib.import_module(module)  # the first optimizer would, in each process anew: seconds


def in_a_process(act: Callable[[], object]) -> int:
    """Return how a forked process ends that does `act`: what it leaves in classes and globals ends with it."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def cut(whole: Path, run: Path, step: int = CUT, batch: int = 9999) -> Path:
    """Return a copy of a run, as it was when the snapshot of `step` was its newest, or of a validation after it."""
    shutil.copytree(whole, run)
    for path in (run / "snapshots").iterdir():
        if path.name[:17] > f"{step:012}.{batch:04}":
            shutil.rmtree(path)
    for path in [*run.glob("metrics*"), run / "last"]:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return run


def assert_alike(whole: Path, resumed: Path) -> None:
    assert differences(final_state(str(whole)), final_state(str(resumed))) == []
    assert (whole / "metrics.csv").read_text() == (resumed / "metrics.csv").read_text()


#: of `KEPT`, rows that also change what no snapshot holds and nothing reads: a long list, a class
SPOKEN_OF = {"Grows", "TellsItsSampler"}
#: of `KEPT`, rows with a set of objects by their addresses, of which it depends on these whether its order is named
BY_ADDRESS = {"Gathering"}
#: of `KEPT`, rows with another warning, such as of snapshots at the ends of epochs only
WARNED = {
    *("Defaulting", "LogsWithoutValidation", "MeasuresGraphs", "NamedParameters"),
    *("TellsChain", "TellsStream", "TellsStreamOfWorker"),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_resumed_run_has_the_objects_of_the_run_before(name: str, tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"

    def live(run: Path) -> None:
        logging.basicConfig(filename=tmp_path / "log", format="%(levelname)s %(message)s", force=True)
        train(KEPT[name], run)

    assert in_a_process(lambda: live(whole)) == 0
    cut(whole, resumed)

    assert in_a_process(lambda: live(resumed)) == 0

    said = (tmp_path / "log").read_text()
    if name not in SPOKEN_OF:
        assert not re.findall("part of (?:no )?snapshot.*|these values cannot be restored.*|the code builds.*", said)
        assert name in BY_ADDRESS or ("WARNING" in said) == (name in WARNED), said
    assert_alike(whole, resumed)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_validation_resumes_in_the_modes_set_in_it(batch: int, tmp_path: Path) -> None:
    made, whole, resumed = (DropsInValidation, None, list), tmp_path / "whole", tmp_path / "resumed"
    assert in_a_process(lambda: train(made, whole)) == 0
    cut(whole, resumed, batch=batch)
    assert max(path.name for path in (resumed / "snapshots").iterdir())[:17] == f"{CUT:012}.{batch:04}"

    assert in_a_process(lambda: train(made, resumed)) == 0
    assert_alike(whole, resumed)


@pytest.mark.skipif(STAND_IN is not None, reason="make test-xla runs them on torch_xla's own device")
@pytest.mark.parametrize("name", ON_DEVICE)
def test_state_on_an_xla_device_is_restored_there(name: str, tmp_path: Path) -> None:
    made, whole, resumed = (ON_DEVICE[name], None, list), tmp_path / "whole", tmp_path / "resumed"
    assert run_xla_ranks(train, made, whole, "xla") == [0]
    cut(whole, resumed)

    assert run_xla_ranks(train, made, resumed, "xla") == [0]
    assert_alike(whole, resumed)


def train_told(folder: Path) -> None:
    logging.basicConfig(filename=folder / "log", format="%(levelname)s %(message)s", force=True)
    train(KEPT["ViewedLate"], folder / "run", "xla")


@pytest.mark.skipif(STAND_IN is not None, reason="make test-xla runs it on torch_xla's own device")
def test_a_view_of_a_weight_on_an_xla_device_is_named(tmp_path: Path) -> None:
    assert run_xla_ranks(train_told, tmp_path) == [0]
    assert len(re.findall("WARNING the module's attribute row, .* is not", (tmp_path / "log").read_text())) == 1


def test_persistent_workers_keep_their_data_between_epochs(tmp_path: Path) -> None:
    """A hook changes the data after the snapshot of an epoch's end, in each life that goes on from there."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert in_a_process(lambda: train((TellsBetweenEpochs, None, list), whole)) == 0
    cut(whole, resumed, 3)

    assert in_a_process(lambda: train((TellsBetweenEpochs, None, list), resumed)) == 0
    assert_alike(whole, resumed)


def test_ranks_that_are_killed_repeatedly_keep_their_objects(tmp_path: Path) -> None:
    plan = FaultPlan(tmp_path / "plan").add("kill", rank=1, step=1, phase="backward")
    plan.add("kill", rank=0, step=3, phase="snapshot_write")
    whole, killed = str(tmp_path / "whole"), str(tmp_path / "killed")
    assert run_ranks(train_together, whole, processes=2) == [0, 0]

    lives = 0
    environment = {**os.environ, **plan.environment}
    while (codes := run_ranks(train_together, killed, processes=2, environment=environment)) != [0, 0]:
        assert -9 in codes, f"ranks ended with {codes}"
        lives += 1
        assert lives == len(plan.fired())

    plan.assert_all_fired()
    for rank, (ours, theirs) in enumerate(zip(final_state(killed), final_state(whole), strict=True)):
        assert differences(ours, theirs) == [], f"rank {rank}"
    assert Path(whole, "metrics.csv").read_text() == Path(killed, "metrics.csv").read_text()


@patch.dict(os.environ)  # which a row changes
@pytest.mark.parametrize("name", NAMED)
def test_state_that_cannot_be_restored_is_named_before_a_resume(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gc.collect()  # modules of other tests, of which a weak dictionary of a class may know
    made, is_refused, words = NAMED[name]
    if is_refused:
        with pytest.raises(UserError, match=words):
            train(made, tmp_path)
    else:
        train(made, tmp_path)
        assert len(re.findall(words, caplog.text)) == 1
        assert "these values cannot be restored from the snapshot" not in caplog.text  # by the life that has it


@pytest.mark.parametrize("name", [name for name in NAMED if name.startswith("Reads") and name.endswith("Late")])
def test_a_resumed_run_makes_again_what_could_not_be_restored(name: str, tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"

    def live(run: Path) -> None:
        logging.basicConfig(filename=tmp_path / "log", force=True)
        train(NAMED[name][0], run)

    assert in_a_process(lambda: live(whole)) == 0
    cut(whole, resumed)

    assert in_a_process(lambda: live(resumed)) == 0
    assert len(re.findall("these values cannot be restored from the snapshot", (tmp_path / "log").read_text())) == 1


@pytest.mark.parametrize("name", RANKED)
def test_state_of_a_single_rank_is_restored_or_named(name: str, tmp_path: Path) -> None:
    words = RANKED[name][2]
    assert run_ranks(train_ranked, name, str(tmp_path), "whole", processes=3) == [0, 0, 0]
    assert len(re.findall(words or "WARNING", (tmp_path / "log").read_text())) == bool(words)
    if words:
        return
    cut(tmp_path / "whole", tmp_path / "resumed")
    plan = FaultPlan(tmp_path / "plan").add("kill", rank=1, step=STEPS - 1, phase="before_commit")
    environment = {**os.environ, **plan.environment}

    assert -9 in run_ranks(train_ranked, name, str(tmp_path), "resumed", processes=3, environment=environment)
    assert run_ranks(train_ranked, name, str(tmp_path), "resumed", processes=3, environment=environment) == [0, 0, 0]
    plan.assert_all_fired()

    for rank, (ours, theirs) in enumerate(
        zip(*(final_state(f"{tmp_path}/{run}") for run in ("resumed", "whole")), strict=True)
    ):
        assert differences(ours, theirs) == [], f"rank {rank}"
    assert (tmp_path / "whole/metrics.csv").read_text() == (tmp_path / "resumed/metrics.csv").read_text()


def test_three_ranks_warn_once_and_name_the_ranks(tmp_path: Path) -> None:
    assert run_ranks(train_logged, str(tmp_path), processes=3) == [0, 0, 0]

    lines = [line for line in (tmp_path / "log").read_text().splitlines() if "not part of snapshots" in line]
    assert len(lines) == 2
    assert lines[0].startswith("WARNING the module's attribute lock, a lock, is not")
    assert lines[0].endswith("(on rank 0)")
    assert lines[1].startswith("WARNING the module's attribute lock, other, a lock, is not")
    assert lines[1].endswith("(on ranks 1, 2)")


@pytest.mark.parametrize("name", MENDED)
def test_a_run_resumes_with_mended_code(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, after, words, held = MENDED[name]
    train(before, tmp_path / "before")
    assert "the code builds" not in caplog.text

    module = train(after, cut(tmp_path / "before", tmp_path / "after"))
    again = len(caplog.records)
    train(after, cut(tmp_path / "after", tmp_path / "again", CUT + 1))

    is_kept = "snapshot's holds" in words  # until the new one is accepted
    assert len(re.findall(words, caplog.text)) == 1 + is_kept
    assert {name: getattr(module, name, None) for name in held} == held
    assert is_kept == any("the code builds" in record.getMessage() for record in caplog.records[again:])


@pytest.mark.parametrize("level", [1.0, 2.0, 3.0])
def test_a_run_resumes_whatever_its_code_sets_up(level: float, tmp_path: Path) -> None:
    """Also where that is what training has come to, of which the snapshot says and this attempt would not."""
    module: Any = train((Levelled, None, list), tmp_path / "before")

    after: Any = train((lambda: Levelled(level), None, list), cut(tmp_path / "before", tmp_path / "after"))

    assert after.loader.dataset.level == 2.0
    assert torch.equal(after.layer.weight, module.layer.weight)


def test_a_snapshot_with_an_unknown_form_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(KEPT["Private"], tmp_path / "whole")
    run = cut(tmp_path / "whole", tmp_path / "run")
    parts = Parts(max((run / "snapshots").iterdir()))
    parts.part["tree"]["progress"] = {"$": "nothing"}
    parts.write()

    train(KEPT["Private"], run)

    assert (
        len(re.findall("is set aside, an older one is taken: .* is not in the format of this version", caplog.text))
        == 1
    )
