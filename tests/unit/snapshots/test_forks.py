"""Forks: the parent's snapshots and rows are read up to one snapshot, and the parent does not change."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.snapshot_writers import alone, save_weights, state_at, take

from midstride.engine.errors import EngineError, SnapshotMissing
from midstride.engine.snapshots.catalog import Snapshot, SnapshotCatalog
from midstride.engine.snapshots.forks import Pins, fork, snapshot_at
from midstride.engine.snapshots.parent import open_run, parent_of
from midstride.engine.snapshots.reader import load_weights, read
from midstride.engine.state.differences import differences
from midstride.engine.storage.store import Store


@pytest.fixture(params=["local", "s3"])
def runs(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a folder of runs, where `a` has snapshots of steps 1 to 6 and keeps all."""
    url = str(tmp_path / "runs") if request.param == "local" else f"{request.getfixturevalue('bucket')}/runs"
    take(alone(Store.open(f"{url}/a")), *range(1, 7))
    return url


def forked(runs: str, step: int, *, of: str = "a", name: str = "b") -> Store:
    source = open_run(f"{runs}/{of}")
    fork(source, snapshot_at(source, step), Store.open(f"{runs}/{name}"))
    return open_run(f"{runs}/{name}")


def steps(store: Store) -> list[int]:
    return [snapshot.position.step for snapshot in SnapshotCatalog(store).snapshots()]


def rows(store: Store) -> list[str]:
    return [text.partition(",")[0] for text in SnapshotCatalog(store).rows()]


def newest(store: Store) -> Snapshot:
    found = SnapshotCatalog(store).newest_good()
    assert found is not None
    return found


def test_a_fork_goes_on_from_its_step(runs: str) -> None:
    parent = Store.open(f"{runs}/a")
    before = {path: parent.read(path) for path in parent.find()}
    child = forked(runs, 3)
    assert sum(child.find().values()) < 1000  # nothing is copied
    assert steps(child) == [1, 2, 3]
    assert not differences(read(child, newest(child), 0), state_at(3))
    take(alone(child, newest(child).name, keep=2), 4, 5, 6)
    assert steps(child) == [1, 2, 3, 5, 6]  # those of the parent are not the fork's to remove
    assert rows(child) == [*"123456"]
    assert {path: parent.read(path) for path in parent.find()} == before
    assert (steps(parent), rows(parent)) == ([*range(1, 7)], [*"123456"])
    ids = {newest(store).manifest["run_id"] for store in (parent, child)}
    assert len(ids) == 2


def test_what_a_fork_needs_stays(runs: str) -> None:
    save_weights(Store.open(f"{runs}/a"), "best", state_at(2)["module"], {"step": 2})
    child, parent = forked(runs, 2), Store.open(f"{runs}/a")
    name = parent_of(child).snapshot  # type: ignore[union-attr]
    assert Pins(parent).read() == {name: [f"{runs}/b"]}
    first = snapshot_at(parent, 6)
    take(alone(parent, first.name, keep=2), 7, 8, 9)
    assert steps(parent) == [2, 8, 9]
    assert (steps(child), rows(child)) == ([2], [*"12"])
    assert not differences(load_weights(child, "best").state_dict, state_at(2)["module"])
    Store.open(runs).remove("b")
    take(alone(parent, newest(parent).name, keep=2), 10)
    assert steps(parent) == [9, 10]


def test_a_fork_of_a_fork(runs: str) -> None:
    child = forked(runs, 3)
    take(alone(child, newest(child).name), 4, 5)
    grandchild = forked(runs, 4, of="b", name="c")
    take(alone(grandchild, newest(grandchild).name), 7)
    assert (steps(grandchild), rows(grandchild)) == ([1, 2, 3, 4, 7], [*"12347"])
    direct = forked(runs, 2, of="b", name="d")
    assert parent_of(direct).run == "a"  # type: ignore[union-attr]  # which has the files
    assert rows(direct) == [*"12"]


def test_another_run_in_the_place_of_the_parent_is_not_read(runs: str) -> None:
    child = forked(runs, 3)
    Store.open(runs).remove("a")
    assert steps(child) == []
    take(alone(Store.open(f"{runs}/a")), 1, 2, 3)
    assert steps(open_run(f"{runs}/b")) == []


#: the nearest steps are named
REFUSED: dict[str, tuple[Callable[[str], object], str]] = {
    "no such step yet": (lambda runs: forked(runs, 70), r"no snapshot of step 70: its newest one is of step 6"),
    "pruned": (lambda runs: forked(runs, 3), r"keeps no snapshot of step 3\. The nearest are of steps 2 and 4"),
    "the first": (lambda runs: forked(runs, 0), r"no snapshot of step 0\. The nearest are of steps 1"),
    "no run": (lambda runs: forked(runs, 1, of="x"), r"/x has no snapshot"),
    "another run": (lambda runs: forked(runs, 1, name="a"), r"/a exists already: give the fork another name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, runs: str) -> None:
    catalog = SnapshotCatalog(Store.open(f"{runs}/a"))
    catalog.remove(catalog.snapshots()[2])
    act, message = REFUSED[case]
    with pytest.raises(EngineError, match=message):
        act(runs)
    assert Store.open(runs).list() == ["a"]


def test_a_snapshot_that_goes_meanwhile(runs: str) -> None:
    source = open_run(f"{runs}/a")
    snapshot = snapshot_at(source, 3)
    SnapshotCatalog(source).remove(snapshot)
    with pytest.raises(SnapshotMissing):
        fork(source, snapshot, Store.open(f"{runs}/b"))
    assert not Store.open(f"{runs}/b").list()
