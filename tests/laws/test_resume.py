"""Law 1: wherever a run dies, and however often, it ends with the bits of the run that nothing befell."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from laws.chains import COVER, PRODUCT, Chain, pairs
from laws.lives import STEPS, Setting, assert_alike, live, live_on
from laws.modules import MODULES, Watched, Worsening

from midstride.engine import (
    BestCheckpoint,
    Callback,
    GradientAccumulationScheduler,
    TrainedWeights,
    Unfreeze,
    WeightAveraging,
)
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.session.attempts import AttemptLog
from midstride.engine.session.outcome import Outcome
from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.state.differences import differences
from midstride.engine.storage.store import Store
from midstride.engine.testing import final_state


def _marks(chain: Chain) -> list[pytest.MarkDecorator]:
    """Those of two processes, one for each layout, die on a disk."""
    if chain.ranks == 2:
        return [pytest.mark.disk]
    return [pytest.mark.fast] if chain.ranks == 1 or chain.layout == "plain" else []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    everything = metafunc.config.getoption("--laws") == "all"
    if "chain" in metafunc.fixturenames:
        cases = [pytest.param(chain, marks=_marks(chain)) for chain in (PRODUCT if everything else COVER)]
        metafunc.parametrize("chain", cases, ids=str)
    if metafunc.function is test_every_kind_of_module_resumes:
        metafunc.parametrize(("name", "ranks"), _modules(everything))


def _modules(everything: bool) -> list[tuple[str, int]]:
    return [
        (name, ranks)
        for name, (_, most) in MODULES.items()
        for ranks in (1, 2, 3)
        if ranks in (1, most) or (everything and most > 1)
    ]


def test_the_cover_of_the_chains_has_every_pair_of_their_product() -> None:
    assert pairs(COVER) == pairs(PRODUCT)


def test_a_run_that_dies_at_every_step_ends_with_the_same_bits(
    chain: Chain, tmp_path: Path, undisturbed: Callable[[Setting], Path]
) -> None:
    setting = Setting(ranks=chain.ranks, layout=chain.layout)
    live_on(setting, tmp_path, chain.add_to(FaultPlan(tmp_path / "plan")))
    assert_alike(tmp_path, undisturbed(setting))


#: one in each epoch; a snapshot is taken after every second step, and in a validation after every second batch
DEATHS = [(5, "validation"), (9, "backward")]


def test_every_kind_of_module_resumes(
    name: str, ranks: int, tmp_path: Path, undisturbed: Callable[[Setting], Path]
) -> None:
    module, _ = MODULES[name]
    manual = not module.automatic_optimization
    setting = Setting(ranks=ranks, module=module)
    plan = FaultPlan(tmp_path / "plan")
    for step, phase in DEATHS:
        plan.add("kill", rank=ranks - 1, step=step, phase="fetch" if manual and phase == "backward" else phase)
    live_on(setting, tmp_path, plan)
    assert_alike(tmp_path, undisturbed(setting))


@pytest.mark.parametrize(("ranks", "interval"), [(1, 0.5), (2, 1.0), (3, 2)])
def test_a_validation_resumes_at_its_batch_and_loader(
    ranks: int, interval: float, tmp_path: Path, undisturbed: Callable[[Setting], Path]
) -> None:
    setting = Setting(
        ranks=ranks, layout="every step", module=Watched, validation=(5, 2), options={"val_check_interval": interval}
    )
    plan = FaultPlan(tmp_path / "plan")
    for visit in range(3):  # of the four or two boundaries there are, and in the validations that follow
        plan.add("kill", rank=visit % ranks, step=2, phase="validation", visit=visit)
    live_on(setting, tmp_path, plan)
    assert_alike(tmp_path, undisturbed(setting))
    calls = final_state(str(tmp_path / "run"))[0]["objects"]["module"][""]["calls"]
    validations = STEPS // (6 * interval if interval <= 1 else interval)
    assert [calls[name] for name in ("start", "epoch start", "epoch end", "end")] == [validations] * 4


def test_a_window_resumes_with_the_buffers_of_each_rank(tmp_path: Path, undisturbed: Callable[[Setting], Path]) -> None:
    # A validation after each batch sees them: they are shared only where the next window opens.
    setting = Setting(ranks=2, layout="accumulation", options={"val_check_interval": 1})
    plan = FaultPlan(tmp_path / "plan").add("kill", rank=1, step=0, phase="validation", visit=5)
    assert -9 in live(setting, tmp_path, plan)
    assert live(setting, tmp_path, plan) == [0, 0]
    plan.assert_all_fired()
    assert_alike(tmp_path, undisturbed(setting))


#: name -> ranks and options: one rank where gradients are as they were, and no rank counts otherwise than others
OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "bf16": (2, {"precision": "bf16"}),
    "16 bits": (2, {"precision": "16"}),
    "64 bits": (2, {"precision": "64"}),
    "clipped by value": (2, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "limited": (2, {"limit_train_batches": 5, "limit_val_batches": 0.5, "val_check_interval": 2}),
    "steps": (1, {"max_epochs": None, "max_steps": 9}),
    "every second epoch": (1, {"check_val_every_n_epoch": 2}),
    "every fourth batch over epochs": (
        2,
        {"check_val_every_n_epoch": None, "val_check_interval": 4, "limit_train_batches": 1, "max_epochs": 8},
    ),
}


ENDS: dict[str, dict[str, Any]] = {
    "steps": {"max_epochs": None, "max_steps": 6, "val_check_interval": 1.0},
    "patience": {"max_epochs": 9, "val_check_interval": 1.0},
    "patience, at least 4 epochs": {"max_epochs": 9, "min_epochs": 4, "val_check_interval": 1.0},
    "patience, within an epoch": {"max_epochs": 9, "val_check_interval": 1},
}


@pytest.mark.parametrize("phase", ["epoch_end", "validation"])
@pytest.mark.parametrize("name", ENDS)
def test_a_fit_that_ends_or_stops_in_an_epoch_completes_it(
    name: str, phase: str, tmp_path: Path, undisturbed: Callable[[Setting], Path]
) -> None:
    setting = Setting(layout="every step", options=ENDS[name], module=Worsening, patience=2)
    plan = FaultPlan(tmp_path / "plan")
    rows = (undisturbed(setting) / "run" / "metrics.csv").read_text().count("\n") - 1
    plan.add("kill", step=rows, phase=phase)
    live_on(setting, tmp_path, plan)
    assert_alike(tmp_path, undisturbed(setting))


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_resumes(name: str, tmp_path: Path, undisturbed: Callable[[Setting], Path]) -> None:
    ranks, options = OPTIONS[name]
    setting = Setting(ranks=ranks, layout="every step", workers=2, options=options)
    plan = FaultPlan(tmp_path / "plan").add("kill", rank=ranks - 1, step=4, phase="forward")
    live_on(setting, tmp_path, plan)
    assert_alike(tmp_path, undisturbed(setting))


#: name -> ranks, options and callbacks
CALLBACKS: dict[str, tuple[int, dict[str, Any], tuple[partial[Callback], ...]]] = {
    "the 2 best": (3, {}, (partial(BestCheckpoint, "val/loss", k=2, filename="{epoch}-{val/loss:.3f}"),)),
    "unfrozen": (1, {}, (partial(Unfreeze, "middle", 1, lr=0.1),)),
    "unfrozen, sharded": (3, {"strategy": "sharded"}, (partial(Unfreeze, ["middle", "norm"], 1),)),
    "adapter alone": (3, {}, (partial(Unfreeze, "middle", 9), partial(TrainedWeights))),
    "adapter alone, fully sharded": (
        3,
        {"strategy": "fully_sharded"},
        (partial(Unfreeze, "middle", 9), partial(TrainedWeights)),
    ),
    "adapter that grows": (
        1,
        {},
        (partial(Unfreeze, "middle", 1), partial(TrainedWeights), partial(BestCheckpoint, "val/loss", "max", k=2)),
    ),
    "averages": (
        3,
        {},
        (partial(WeightAveraging, 0.9, every_steps=2), partial(BestCheckpoint, "val/loss", k=2)),
    ),
    "windows": (3, {}, (partial(GradientAccumulationScheduler, {1: 4}),)),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_every_callback_resumes(name: str, tmp_path: Path, undisturbed: Callable[[Setting], Path]) -> None:
    ranks, options, callbacks = CALLBACKS[name]
    setting = Setting(ranks=ranks, options=options, callbacks=callbacks)
    plan = FaultPlan(tmp_path / "plan")
    for step, phase in ((2, "validation"), (5, "before_commit"), (7, "forward")):
        plan.add("kill", rank=ranks - 1, step=step, phase=phase)
    live_on(setting, tmp_path, plan)
    expected = undisturbed(setting)
    assert_alike(tmp_path, expected)
    files, theirs = (sorted(path.glob("run/checkpoints/*.ckpt")) for path in (tmp_path, expected))
    assert [file.name for file in files] == [file.name for file in theirs]
    assert len(files) == 2 * any(one.func is BestCheckpoint for one in callbacks)
    for one, other in zip(files, theirs, strict=True):
        assert not differences(torch.load(one), torch.load(other)), one.name


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two ranks that was killed; of its snapshots, that of step 8 is the newest."""
    folder = tmp_path_factory.mktemp("killed")
    plan = FaultPlan(folder / "plan").add("kill", rank=0, step=9, phase="before_commit")
    assert -9 in live(Setting(ranks=2), folder, plan)
    plan.assert_all_fired()
    return folder


@pytest.mark.parametrize(
    "file", ["rank-00001-of-00002.safetensors", "rank-00001-of-00002.json", "metrics.csv", "manifest.json"]
)
def test_a_file_of_an_older_snapshot_sets_a_snapshot_aside(
    file: str, killed: Path, tmp_path: Path, undisturbed: Callable[[Setting], Path]
) -> None:
    """Law 2; files with other damage are in the table of faults."""
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    oldest, *_, newest = sorted(path.parent for path in (tmp_path / "run" / "snapshots").glob("*/manifest.json"))
    shutil.copy(oldest / file, newest)

    assert live(Setting(ranks=2), tmp_path) == [0, 0]

    resumed_from = json.loads((tmp_path / "run" / "lease" / "000002.json").read_text())["resumed_from"]
    assert resumed_from < newest.name
    assert (newest / "aside.json").exists()
    assert_alike(tmp_path, undisturbed(Setting(ranks=2)))


def test_a_fatal_snapshot_is_set_aside_unless_it_is_the_last(
    tmp_path: Path, undisturbed: Callable[[Setting], Path]
) -> None:
    setting = Setting()
    plan = FaultPlan(tmp_path / "plan").add("kill", step=8, phase="before_commit")
    assert live(setting, tmp_path, plan) == [-9]
    log = AttemptLog(Store.open(tmp_path / "run"))
    names = sorted(path.parent.name for path in (tmp_path / "run" / "snapshots").glob("*/manifest.json"))
    for name in [*names[1:], *names]:  # twice of each but the oldest
        log.record(replace(log.begin(), resumed_from=name), Outcome("died", "killed"))
    log.record(replace(log.begin(), resumed_from=names[0]), Outcome("died", "killed"))

    assert live(setting, tmp_path, plan) == [0]

    plan.assert_all_fired()
    assert json.loads((tmp_path / "run" / "lease" / "000002.json").read_text())["resumed_from"] == names[0]
    aside = SnapshotCatalog(Store.open(tmp_path / "run")).set_aside_reasons()
    assert list(aside) == names[1:]
    assert "resumed from it and died before their first new step" in aside[names[-1]]
    assert_alike(tmp_path, undisturbed(setting))
