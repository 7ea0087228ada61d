"""Law of forks: forked or replayed unchanged, a run has its parent's bits, and the parent does not change."""

import json
import math
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from laws.lives import SampleData, Setting, assert_runs_alike, live, live_on
from laws.loaders import LOADERS
from laws.modules import MODULES
from laws.strategies import ROWS
from laws.streams import STREAMS, Several, StreamData

from midstride.engine import Callback, GradientAccumulationScheduler, TrainingModule, Unfreeze, WeightAveraging
from midstride.engine.errors import UserError
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.runs.recomputed_states import state_difference
from midstride.engine.runs.replayed_rows import first_difference, parse_rows
from midstride.engine.runs.run_report import metric_rows
from midstride.engine.session.replay_plan import NEVER, RESULT, ReplayPlan
from midstride.engine.snapshots.catalog import Snapshot, SnapshotCatalog
from midstride.engine.snapshots.forks import fork, snapshot_at
from midstride.engine.snapshots.parent import open_run
from midstride.engine.snapshots.reader import read
from midstride.engine.snapshots.weights import is_of_the_end
from midstride.engine.storage.store import Store

#: strategy -> row of the laws of strategies, and the module of it
STRATEGIES = {
    "horovod": "",
    "pipeline": "layers in a row",
    "dp on 2": "",
    "ddp2": "",
    "sharded": "",
    "fully_sharded": "",
    "ddp, 16 bits": "",
    "fully_sharded, windows": "",
}


class Kicks(Callback):
    """Changes the gradients by its own state, which it also draws."""

    def __init__(self) -> None:
        self.count, self.generator = 0, random.Random(5)

    def on_after_backward(self, trainer: Any, module: TrainingModule) -> None:
        self.count += 1
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad *= 1 + self.generator.random() / self.count


class Even(SampleData):
    """Batches for as many samples whatever the number of ranks."""

    def __init__(self, ranks: int, workers: int, validation: Any) -> None:
        super().__init__(3, workers, validation)


#: what a Trainer can be given, beside the module
ADDED: dict[str, Setting] = {
    "averages (EMA)": Setting(1, callbacks=(partial(WeightAveraging, 0.9),)),
    "averages (SWA)": Setting(1, callbacks=(partial(WeightAveraging, start_step=4, every_steps=2),)),
    "a callback with state": Setting(1, callbacks=(Kicks,)),
    "windows that grow": Setting(
        1, options={"max_epochs": 3}, callbacks=(partial(GradientAccumulationScheduler, {1: 2, 2: 4}),)
    ),
    "layers that thaw": Setting(1, options={"max_epochs": 3}, callbacks=(partial(Unfreeze, "first", 1),)),
    "bf16, windows": Setting(1, options={"precision": "bf16", "accumulate_grad_batches": 2, "max_epochs": 4}),
    "scaled": Setting(1, options={"precision": "16", "gradient_clip_val": 0.5}),
    "compiled": Setting(1, options={"compile": True}),
    "verified": Setting(1, options={"verify_every": 3}),
}
COVER = ("single", "ddp", "accumulation", "pipeline", "data: shuffle buffer", "data: dict")
LOADED = ("a sampler with hidden state", "persistent workers", "no batches")
PRODUCT = (
    *("single", "ddp", "accumulation"),
    *STRATEGIES,
    *(f"data: {kind}" for kind in STREAMS),
    *(f"loader: {kind}" for kind in LOADED),
    *(f"module: {kind}" for kind in MODULES),
    *ADDED,
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "row" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--laws") == "all"
        metafunc.parametrize("row", PRODUCT if everything else COVER)


def setting_of(row: str) -> Setting:
    keeps_all = {"snapshots": {"every_steps": 2, "keep": 100}}
    kind, _, name = row.partition(": ")
    if row in STRATEGIES:
        setting = ROWS[row].settings(ROWS[row].ranks[0], STRATEGIES[row])[0]
    elif kind == "data":
        options = {"val_check_interval": 1.0}
        setting = Setting(1, workers=2, options=options, module=Several, data=partial(StreamData, name))
    elif kind == "module":
        setting = Setting(1, module=MODULES[name][0])
    elif row in ADDED:
        setting = ADDED[row]
    elif kind == "loader":
        setting = Setting(1, workers=2, data=LOADERS[name])
    else:
        windows = {"accumulate_grad_batches": 4, "max_epochs": 4} if row == "accumulation" else {}
        setting = Setting(3 if row == "ddp" else 1, options=windows)
    return replace(setting, options={**setting.options, **keeps_all})


def state_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return time and content of every file in `folder`, and the times of its folders."""
    found = sorted([folder, *folder.rglob("*")])
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in found}


def test_a_fork_ends_with_the_bits_of_its_parent(row: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    setting, parent, child = setting_of(row), tmp_path / "parent", tmp_path / "child"
    for folder in (parent, child):
        folder.mkdir()
    assert live(setting, parent) == [0] * setting.ranks
    before, source = state_of(parent / "run"), open_run(str(parent / "run"))
    last = int(metric_rows(source)[-1]["step"])
    start = snapshot_at(source, next(step for step in range(last // 3, last) if _has(source, step)))
    fork(source, start, Store.open(str(child / "run")))
    assert live(setting, child) == [0] * setting.ranks
    assert_runs_alike(str(child / "run"), str(parent / "run"))

    again = tmp_path / "again"
    again.mkdir()
    fork(source, start, Store.open(str(again / "run")), is_temporary=True)
    never = replace(setting, options={**setting.options, "snapshots": {"every_steps": NEVER}})
    assert 0 not in live(never, again, ReplayPlan(str(again), last - 1))
    result = json.loads((again / RESULT).read_text())
    rows, page = parse_rows(result["rows"]), result["page"]
    layers = {name.rpartition(".")[0] for name, _ in setting.module().named_parameters()}
    assert (page["layers"].keys(), len(page["steps"][-1]["losses"]) > 0) == (layers, True)
    norms = [one["gradient"] for one in page["layers"].values()]
    assert math.isclose(page["steps"][-1]["gradient"], math.hypot(*norms), rel_tol=1e-5)
    assert {int(found["step"]) for found in rows} >= {*range(start.position.step + 1, last)}
    assert first_difference(metric_rows(source), rows, last - 1) is None
    if request.config.getoption("--laws") == "all":
        assert_states_are_computed_again(setting, source, start, tmp_path / "verified")
    assert state_of(parent / "run") == before


def assert_states_are_computed_again(setting: Setting, source: Store, start: Snapshot, folder: Path) -> None:
    """Compute the states of the snapshots after `start` again, as `verify` does, and compare them."""
    kept = [one for one in SnapshotCatalog(source).snapshots() if one.position > start.position]
    targets = [one for one in kept if not (one.position.after or is_of_the_end(one))]
    steps = tuple(one.position.step for one in targets)
    folder.mkdir()
    fork(source, start, Store.open(str(folder / "run")), is_temporary=True)
    never = replace(setting, options={**setting.options, "snapshots": {"every_steps": NEVER, "keep": 100}})
    assert 0 not in live(never, folder, ReplayPlan(str(folder), steps[-1], snapshots_at=steps))
    child = open_run(str(folder / "run"))
    computed = {one.position: one for one in SnapshotCatalog(child).snapshots() if one.generation > start.generation}
    for target in targets:
        for rank in range(setting.ranks):
            pair = read(source, target, rank), read(child, computed[target.position], rank)
            assert state_difference(*pair, target.position.step, rank) is None


def _has(source: Store, step: int) -> bool:
    return any(one.position.step == step for one in SnapshotCatalog(source).snapshots())


def parent_of_forks(setting: Setting, folder: Path, plan: FaultPlan | None = None) -> Store:
    """Train a run that keeps all snapshots, and return it."""
    folder.mkdir()
    assert live(setting, folder, plan) == [0] * setting.ranks
    return open_run(str(folder / "run"))


def fork_into(folder: Path, source: Store, step: int) -> None:
    folder.mkdir(exist_ok=True)
    fork(source, snapshot_at(source, step), Store.open(str(folder / "run")))


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_fork_is_killed_and_forked(ranks: int, tmp_path: Path) -> None:
    setting = replace(setting_of("accumulation"), ranks=ranks)
    source = parent_of_forks(setting, tmp_path / "parent")
    fork_into(tmp_path / "child", source, 2)
    plan = FaultPlan(tmp_path / "plan")
    for step, phase in ((2, "backward"), (4, "before_commit"), (5, "forward")):
        plan.add("kill", rank=step % ranks, step=step, phase=phase)
    live_on(setting, tmp_path / "child", plan)
    assert_runs_alike(str(tmp_path / "child/run"), source.url)
    child = open_run(str(tmp_path / "child/run"))
    for name, step in (("inherited", 2), ("own", 6)):
        fork_into(tmp_path / name, child, step)
        assert live(setting, tmp_path / name) == [0] * ranks
        assert_runs_alike(str(tmp_path / name / "run"), source.url)


@pytest.mark.parametrize("ranks", [1, 2])  # alone, it is another strategy
def test_a_fork_on_fewer_ranks_is_a_resume_on_fewer_ranks(ranks: int, tmp_path: Path) -> None:
    setting = Setting(3, data=Even, options={"snapshots": {"every_steps": 1, "keep": 100}})
    fewer = replace(setting, ranks=ranks, options={**setting.options, "accept_change": ["strategy"]})
    parent = parent_of_forks(setting, tmp_path / "parent")
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    plan = FaultPlan(tmp_path / "plan").add("stop", rank=0, step=5, phase="fetch", visit=1)
    assert 0 not in live(setting, stopped, plan)
    plan.assert_all_fired()
    fork_into(tmp_path / "child", parent, snapshot_at(open_run(str(stopped / "run"))).position.step)
    for folder in (tmp_path / "child", stopped):
        assert live(fewer, folder) == [0] * ranks
    assert_runs_alike(str(tmp_path / "child/run"), str(stopped / "run"))


def test_a_fork_on_s3(bucket: str, tmp_path: Path) -> None:
    setting = setting_of("single")
    setting.train(f"{bucket}/parent")
    source = open_run(f"{bucket}/parent")
    before = {path: source.read(path) for path in source.find()}
    fork(source, snapshot_at(source, 4), Store.open(f"{bucket}/child"))
    setting.train(f"{bucket}/child")
    assert_runs_alike(f"{bucket}/child", f"{bucket}/parent")
    assert {path: source.read(path) for path in source.find()} == before


def test_skipped_batches_from_a_fork_on(tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": 4, "max_epochs": 4, "snapshots": {"every_steps": 1, "keep": 99}}
    plain = Setting(1, options=options)
    skipping = Setting(1, options={**options, "skip_batches": [4, "6-7"], "accept_change": ["skip_batches"]})
    source = parent_of_forks(plain, tmp_path / "parent")
    whole = parent_of_forks(skipping, tmp_path / "whole")
    fork_into(tmp_path / "child", source, 3)
    assert live(skipping, tmp_path / "child") == [0]
    assert_runs_alike(str(tmp_path / "child/run"), whole.url)


def test_a_step_that_is_half_trained_is_not_skipped(tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": 4, "max_epochs": 4, "snapshots": {"every_steps": 50, "keep": 99}}
    plan = FaultPlan(tmp_path / "plan").add("snapshot", step=2, phase="backward", visit=1)
    source = parent_of_forks(Setting(1, options=options), tmp_path / "parent", plan)
    plan.assert_all_fired()
    assert snapshot_at(source, 2).position.after
    fork_into(tmp_path / "child", source, 2)
    skipping = Setting(1, options={**options, "skip_batches": [3], "accept_change": ["skip_batches"]})
    with pytest.raises(UserError, match="step 3 cannot be left out: its batch 0 was trained on before"):
        skipping.train(str(tmp_path / "child/run"))
