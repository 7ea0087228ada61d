"""Loops of a user's own: killed anywhere they end with the bits of the undisturbed run, which are the plain loop's."""

import atexit
import os
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from laws.axes import cover, product
from laws.loops import SEED, SHAPES, WORLDS, run_loop
from torch import nn
from torch.utils.data import DataLoader

from midstride.engine import Loop
from midstride.engine.errors import EngineError
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.snapshots.forks import fork, snapshot_at
from midstride.engine.snapshots.parent import open_run
from midstride.engine.state.differences import differences
from midstride.engine.storage.store import Store
from midstride.engine.testing import run_ranks

#: place of a death -> its visit in the first attempt
PLACES = {"fetch": 22, "forward": 6, "backward": 5, "step": 2, "between": 4, "validation": 2, "epoch end": 1}
AXES = {"shape": [*SHAPES], "world": [*WORLDS], "place": [*PLACES]}
#: in which no loop has what they need
IMPOSSIBLE = {("accumulation", "sharded")}


def possible(shape: str, world: str) -> bool:
    return (shape, world) not in IMPOSSIBLE


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    everything = metafunc.config.getoption("--laws") == "all"
    if "place" in metafunc.fixturenames:
        cases = product(AXES) if everything else FEW
        rows = [tuple(case.values()) for case in cases if possible(case["shape"], case["world"])]
        metafunc.parametrize(("shape", "world", "place"), rows)
    elif "shape" in metafunc.fixturenames:
        worlds = {name: AXES[name] for name in ("shape", "world")}
        rows = [tuple(case.values()) for case in (product(worlds) if everything else cover(worlds)[::3])]
        metafunc.parametrize(("shape", "world"), [row for row in rows if possible(*row)])


#: of the default suite
FEW = [
    {"shape": "epochs", "world": "one process", "place": "validation"},
    {"shape": "epochs", "world": "own DDP", "place": "backward"},
    {"shape": "steps", "world": "one process", "place": "fetch"},
    {"shape": "accumulation", "world": "one process", "place": "between"},
    {"shape": "accumulation", "world": "loop.ddp", "place": "step"},
    {"shape": "two loaders", "world": "one process", "place": "forward"},
    {"shape": "stream", "world": "one process", "place": "epoch end"},
    {"shape": "steps", "world": "sharded", "place": "between"},
    {"shape": "own loader", "world": "one process", "place": "forward"},
    {"shape": "tensors", "world": "own DDP", "place": "between"},
]


def ended(folder: Path, ranks: int) -> list[dict[str, object]]:
    return [torch.load(folder / f"ended-{rank}.pt", weights_only=False) for rank in range(ranks)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Return a function that gives the folder of an undisturbed loop, by its shape and world."""

    @cache
    def run(shape: str, world: str) -> Path:
        folder, ranks = tmp_path_factory.mktemp("undisturbed"), WORLDS[world][0]
        assert run_ranks(run_loop, shape, world, folder, [], processes=ranks) == [0] * ranks
        return folder

    return run


def assert_alike(folder: Path, other: Path, ranks: int) -> None:
    pairs = zip(ended(folder, ranks), ended(other, ranks), strict=True)
    assert [differences(a, b) for a, b in pairs] == [[]] * ranks


def test_a_killed_loop_ends_as_undisturbed(
    shape: str, world: str, place: str, undisturbed: Callable[[str, str], Path], tmp_path: Path
) -> None:
    ranks, whole, killed = WORLDS[world][0], undisturbed(shape, world), tmp_path
    planned = [(ranks - 1, place, PLACES[place]), (0, "between", 5)]
    for _ in planned:
        assert -9 in run_ranks(run_loop, shape, world, killed, planned, processes=ranks)
    assert run_ranks(run_loop, shape, world, killed, planned, processes=ranks) == [0] * ranks
    assert len([*killed.glob("death-*")]) == len(planned)
    assert_alike(whole, killed, ranks)
    assert (killed / "run/metrics.csv").read_text() == (whole / "run/metrics.csv").read_text()


def test_an_undisturbed_loop_has_the_bits_of_the_plain_loop(
    shape: str, world: str, undisturbed: Callable[[str, str], Path], tmp_path: Path
) -> None:
    ranks = WORLDS[world][0]
    assert run_ranks(run_plain, shape, world, tmp_path, processes=ranks) == [0] * ranks
    assert_alike(tmp_path, undisturbed(shape, world), ranks)


#: what happens to a rank in a snapshot's commit, or at a boundary -> kind and phase of the fault, codes of the ranks
STRUCK: dict[str, tuple[Any, str, set[int]]] = {
    "killed as it writes": ("kill", "snapshot_write", {-9}),
    "killed before the commit": ("kill", "before_commit", {-9}),
    "asked to stop": ("stop", "after_step", {75}),
}


@pytest.mark.parametrize("name", STRUCK)
@pytest.mark.parametrize("in_world", ["one process", "own DDP"])
def test_a_loop_that_is_struck_ends_as_undisturbed(
    name: str, in_world: str, undisturbed: Callable[[str, str], Path], tmp_path: Path
) -> None:
    kind, phase, codes = STRUCK[name]
    ranks, folder = WORLDS[in_world][0], undisturbed("epochs", in_world)
    plan = FaultPlan(tmp_path / "plan").add(
        kind, rank=0 if phase == "before_commit" else ranks - 1, step=6, phase=phase
    )
    environment = {**os.environ, **plan.environment}
    first = run_ranks(run_loop, "epochs", in_world, tmp_path, [], processes=ranks, environment=environment)
    plan.assert_all_fired()
    assert codes <= {*first}
    assert 75 not in codes or {*first} == codes
    assert run_ranks(run_loop, "epochs", in_world, tmp_path, [], processes=ranks) == [0] * ranks
    assert_alike(folder, tmp_path, ranks)
    assert (tmp_path / "run/metrics.csv").read_text() == (folder / "run/metrics.csv").read_text()


@pytest.mark.parametrize("in_world", ["one process", "own DDP"])
def test_a_fork_of_a_loop_ends_as_its_parent(
    in_world: str, undisturbed: Callable[[str, str], Path], tmp_path: Path
) -> None:
    ranks, parent = WORLDS[in_world][0], undisturbed("epochs", in_world)
    source = open_run(str(parent / "run"))
    oldest = SnapshotCatalog(source).snapshots()[0]
    assert oldest.position.step < snapshot_at(source).position.step
    fork(source, oldest, Store.open(tmp_path / "run"))
    assert run_ranks(run_loop, "epochs", in_world, tmp_path, [], processes=ranks) == [0] * ranks
    assert_alike(parent, tmp_path, ranks)
    assert (tmp_path / "run/metrics.csv").read_text() == (parent / "run/metrics.csv").read_text()
    assert len([*(tmp_path / "run/lease").iterdir()]) == 1


def test_a_fork_of_a_loop_on_fewer_ranks_is_refused(undisturbed: Callable[[str, str], Path], tmp_path: Path) -> None:
    source = open_run(str(undisturbed("epochs", "own DDP") / "run"))
    fork(source, snapshot_at(source), Store.open(tmp_path / "run"))
    assert run_ranks(run_refused, tmp_path, processes=2) == [0, 0]
    texts = {path.read_text() for path in tmp_path.glob("refused-*")}
    assert [" was taken by 3 processes, now there are 2" in text for text in texts] == [True]
    assert not (tmp_path / "run/lease").exists()


@pytest.mark.parametrize("world", ["loop.ddp", "own DDP", "own DDP, met again"])
def test_ranks_commit_pending_snapshots_before_they_part(world: str, tmp_path: Path) -> None:
    assert run_ranks(run_to_exit, world, tmp_path, processes=2) == [0, 0]
    assert SnapshotCatalog(Store.open(tmp_path / "run")).snapshots()[-1].position.step == 3
    assert [path.read_text() for path in tmp_path.glob("at-exit-*")] == ["", ""]


def run_to_exit(world: str, folder: Path) -> None:
    """Leave `loop.ddp` in its last batch; end a world of the script's own after it, with all its groups."""
    world, _, again = world.partition(", ")
    if is_own := world == "own DDP":
        dist.init_process_group("gloo")
    loop = Loop(folder / "run", seed=SEED, snapshots={"every_steps": 1}, enable_progress_bar=False)
    model = WORLDS[world][1](loop, nn.Linear(2, 1))
    loop.keep(model=model)
    for step, batch in enumerate(loop.steps(loop.loader(DataLoader(torch.ones(8, 2), 1)), 3)):
        model(batch).sum().backward()
        if step == 2 and not is_own:
            break
    if is_own:
        dist.destroy_process_group()
    if again:
        dist.init_process_group("gloo")
    with (folder / f"at-exit-{loop.rank}").open("w") as file, redirect_stderr(file):
        atexit._run_exitfuncs()  # a forked rank ends without them


def run_refused(folder: Path) -> None:
    try:
        run_loop("epochs", "own DDP", folder, [])
    except EngineError as error:
        (folder / f"refused-{os.environ['RANK']}").write_text(str(error))


def run_plain(shape: str, world: str, folder: Path) -> None:
    run_loop(shape, world, folder, [], plain=True)
