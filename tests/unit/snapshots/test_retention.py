"""Pruning: old snapshots go, nothing else does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.snapshot_files import Killed, flip
from support.snapshot_writers import OPEN, alone, take

from midstride.engine.errors import SnapshotDamaged
from midstride.engine.snapshots import metric_rows as segments
from midstride.engine.snapshots.catalog import Position, SnapshotCatalog, snapshot_name
from midstride.engine.snapshots.lease import acquire
from midstride.engine.snapshots.writer import Writer
from midstride.engine.storage.store import Store
from midstride.engine.world import World


def test_pruning_keeps_the_newest_and_every_row(store: Store):
    writer = alone(store, keep=2)
    taken = take(writer, *range(1, 7))
    assert SnapshotCatalog(store).snapshots() == taken[-2:]
    assert store.list("snapshots") == [snapshot.name for snapshot in taken[-2:]]
    assert SnapshotCatalog(store).rows() == [f"{step},row\n" for step in range(1, 7)]
    (more,) = take(alone(store, taken[4].name, keep=2), 6)
    assert SnapshotCatalog(store).snapshots() == [taken[4], more]
    assert SnapshotCatalog(store).rows() == [f"{step},row\n" for step in range(1, 7)]
    assert SnapshotCatalog(store).prune(1) == [taken[4].name]


def test_the_first_in_so_many_steps_stays_for_good(store: Store):
    def archiving() -> Writer:
        lease = acquire(store, SnapshotCatalog(store).newest_name() or None, {})
        OPEN.append(Writer(store, lease, World(), lambda value: [value], "digits", 2, archive_every_steps=4))
        return OPEN[-1]

    take(archiving(), *range(1, 12))
    assert [snapshot.position.step for snapshot in SnapshotCatalog(store).snapshots()] == [1, 4, 8, 10, 11]
    take(archiving(), 12, 13, 14)
    assert [snapshot.position.step for snapshot in SnapshotCatalog(store).snapshots()] == [1, 4, 8, 12, 13, 14]
    assert len(SnapshotCatalog(store).rows()) == 14


def test_a_kill_at_any_moment_of_pruning_loses_nothing(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    taken = take(alone(store), 1, 2, 3)
    for deadly in range(20):
        left = [deadly]

        def count(call: Callable[..., Any], left: list[int] = left) -> Callable[..., Any]:
            def counted(*args: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
                return call(*args)

            return counted

        with monkeypatch.context() as patch:
            for verb in ("write", "remove"):
                patch.setattr(type(store), verb, count(getattr(type(store), verb)))
            try:
                SnapshotCatalog(store).prune(1)
                finished = True
            except Killed:
                finished = False
        assert SnapshotCatalog(store).newest_good() == taken[-1]
        assert SnapshotCatalog(store).set_aside_reasons() == {}
        assert SnapshotCatalog(store).rows() == ["1,row\n", "2,row\n", "3,row\n"]
        if finished:
            break
    assert finished
    SnapshotCatalog(store).prune(1)
    assert store.list("snapshots") == [taken[-1].name]


def test_a_long_run_does_not_pile_up_files(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(segments, "FOLD", 4)
    taken = take(alone(store, keep=1), *range(1, 31))
    single, *files = store.list("metrics")
    assert single.startswith(taken[28].name)
    assert files == [
        *(f"folded-1-{taken[last - 1].name}.json" for last in (20, 24, 28)),
        f"folded-2-{taken[15].name}.json",
    ]
    assert SnapshotCatalog(store).rows() == [f"{step},row\n" for step in range(1, 31)]
    file = Path(store.url, "metrics", files[0])
    flip(file, 0.5)
    with pytest.raises(SnapshotDamaged, match=f"metrics/{file.name}"):
        SnapshotCatalog(store).rows()


@pytest.mark.parametrize("deadly", range(7))
def test_a_kill_at_any_moment_of_folding_loses_nothing(store: Store, monkeypatch: pytest.MonkeyPatch, deadly: int):
    monkeypatch.setattr(segments, "FOLD", 4)
    kept = segments.MetricSegments(store)
    for step in range(3):
        kept.add(snapshot_name(Position(step), 1), f"{step},row\n")
    calls = []

    def count(verb: str) -> Callable[..., Any]:
        real = getattr(type(store), verb)

        def counted(*args: Any) -> Any:
            calls.append(verb)
            if len(calls) > deadly:
                raise Killed
            return real(*args)

        return counted

    with monkeypatch.context() as patch:
        for verb in ("write", "remove"):
            patch.setattr(type(store), verb, count(verb))
        try:
            kept.add(snapshot_name(Position(3), 1), "3,row\n")
        except Killed:
            calls.append("killed")
    assert ("killed" in calls) == (deadly < 6)  # two writes, four removals
    assert list(kept.read()[0].values()) == [f"{step},row\n" for step in range(4 if deadly else 3)]
    for step in range(4 if deadly else 3, 12):
        kept.add(snapshot_name(Position(step), 1), f"{step},row\n")
    assert sorted(kept.read()[0].values()) == sorted(f"{step},row\n" for step in range(12))


def test_unremovable_snapshots_do_not_stop_the_run(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    writer = alone(store, keep=1)
    take(writer, 1)

    def refuse(*args: Any) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(type(store), "remove", refuse)
    take(writer, 2)
    monkeypatch.undo()
    assert "could not be removed: not yours" in caplog.text
    (third,) = take(writer, 3)
    assert SnapshotCatalog(store).snapshots() == [third]
    assert len(SnapshotCatalog(store).rows()) == 3
