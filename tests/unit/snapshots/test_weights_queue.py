"""Best and last weights on their way to the store."""

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.limit import LIMIT_S
from support.rank_threads import Ranks
from support.slow_stores import Gated, refuse
from support.snapshot_writers import alone, open_writer, take

from midstride.engine.errors import SnapshotError, StoreFull, StoreSilent, Superseded
from midstride.engine.snapshots.catalog import Position, SnapshotCatalog
from midstride.engine.snapshots.lease import Lease, acquire
from midstride.engine.snapshots.reader import load_weights
from midstride.engine.snapshots.weights import download_tensors, newest_weights
from midstride.engine.snapshots.writer import Writer
from midstride.engine.state.differences import differences
from midstride.engine.state.row_shards import no_rows, shard_rows
from midstride.engine.storage.s3 import S3Store
from midstride.engine.storage.store import Store
from midstride.engine.world import World


def value_of(store: Store, folder: str = "best") -> float:
    return float(load_weights(store, folder).state_dict["w"][0])


def test_weights_are_those_of_the_moment_and_the_newest_win(writer: Writer, store: Store) -> None:
    gate, weights = Gated(), {"w": torch.ones(9)}
    writer.take(Position(1), {}, "", {}, gate)
    assert gate.reached.wait(LIMIT_S)
    for step in (1, 2, 3):  # they come while the thread is busy
        weights["w"].fill_(step)
        writer.save_weights("best", Position(step), weights, {"metrics": {"val/loss": 1.0}, "step": step})
    weights["w"].fill_(7)
    writer.save_weights("last", Position(7), weights, {"step": 7})
    weights["w"].fill_(9)
    assert store.list("best") == []
    gate.open.set()
    writer.flush_weights()
    assert (value_of(store), value_of(store, "last")) == (3.0, 7.0)
    assert load_weights(store, "best").facts["metrics"] == {"val/loss": 1.0}


class Interrupted:
    """Does something at the n-th call of any of some functions in one thread; what a process that sleeps there sees."""

    def __init__(self, number: int, act: Callable[[], object]) -> None:
        self.left, self.act, self.thread = number, act, 0

    def wrap(self, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        real = getattr(owner, name)

        def interrupted(*arguments: Any, **options: Any) -> Any:
            if threading.get_ident() == self.thread:
                self.left -= 1
                if self.left == -1:
                    self.act()
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, interrupted)


#: the store -> the functions through which it is changed
SEAMS: dict[str, list[tuple[Any, str]]] = {
    "local": [(os, "open"), (os, "fsync"), (os, "listdir"), (Path, "replace"), (Path, "unlink")],
    "s3": [(S3Store, "_retried"), (S3Store, "_put")],
}


@pytest.mark.parametrize("kind", SEAMS)
def test_a_world_suspended_in_writing_weights_changes_no_reading(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    at = str(tmp_path) if kind == "local" else request.getfixturevalue("bucket")
    number, fired = 0, True
    while fired:
        with pytest.MonkeyPatch.context() as patch:
            fired = _sleeps(Store.open(f"{at}/{number}"), SEAMS[kind], number, patch)
        number += 1 if kind == "local" else 4  # there it takes a while
    assert number > 30


def _sleeps(store: Store, seams: list[tuple[Any, str]], number: int, patch: pytest.MonkeyPatch) -> bool:
    """Let a world sleep at its n-th operation, until a newer one has finished the run; return whether it got there."""
    older = alone(store, keep=1)
    older.save_weights("best", Position(1), {"w": torch.ones(3)}, {"step": 1})
    (first,) = take(older, 1)

    def finish() -> None:
        newer = alone(store, first.name, keep=1)
        newer.save_weights("best", Position(2), {"w": torch.full((3,), 20.0)}, {"step": 2})
        newer.save_weights("last", Position(2), {"w": torch.full((3,), 21.0)}, {"step": 2})
        take(newer, 2)

    sleeper = Interrupted(number, finish)
    for owner, name in seams:
        sleeper.wrap(owner, name, patch)
    sleeper.thread = older._thread.ident or 0
    older.save_weights("best", Position(3), {"w": torch.full((3,), 3.0)}, {"step": 3})
    older.save_weights("best", Position(4), {"w": torch.full((3,), 4.0)}, {"step": 4})
    with contextlib.suppress(Superseded, SnapshotError):
        older.flush_weights()
        older.take(Position(5), {}, "", {})
        older.save_weights("best", Position(6), {"w": torch.full((3,), 6.0)}, {"step": 6})
        older.save_weights("last", Position(6), {"w": torch.full((3,), 6.0)}, {"step": 6})
        older.flush_weights()
        older.flush()
    if sleeper.left >= 0:
        return False
    assert (value_of(store), value_of(store, "last")) == (20.0, 21.0)
    last = alone(store, SnapshotCatalog(store).snapshots()[-1].name, keep=1)
    take(last, 7)
    assert sorted(store.find("best")) == sorted(file for file in store.find("best") if "-g000002" in file)
    assert value_of(store) == 20.0
    return True


def test_weights_after_the_resumed_snapshot_do_not_count(store: Store) -> None:
    older = alone(store)
    older.save_weights("best", Position(1), {"w": torch.ones(3)}, {"step": 1})
    (first,) = take(older, 1)
    older.save_weights("best", Position(3), {"w": torch.full((3,), 3.0)}, {"step": 3})
    older.flush_weights()
    assert value_of(store) == 3.0
    alone(store, first.name)
    assert value_of(store) == 1.0


@pytest.mark.parametrize("error", [ConnectionError("no answer"), OSError(errno.ENOSPC, "No space left on device")])
def test_unwritten_weights_go_before_the_next_snapshot(
    error: OSError, writer: Writer, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer.save_weights("best", Position(1), {"w": torch.ones(3)}, {"step": 1})
    writer.flush_weights()
    with monkeypatch.context() as patch:
        refuse(error, "best/", store, patch)
        writer.save_weights("best", Position(2), {"w": torch.full((3,), 2.0)}, {"step": 2})
        with pytest.raises(StoreSilent if isinstance(error, ConnectionError) else StoreFull):
            writer.flush_weights()
        writer.check()  # training goes on
        assert "They are kept, and written before the next snapshot is committed" in caplog.text
        snapshot = writer.take(Position(2), {}, "", {}).future
        assert isinstance(snapshot.exception(100), SnapshotError)
        assert SnapshotCatalog(store).snapshots() == []
        if isinstance(error, ConnectionError):  # that one was dropped, and the training goes on all the same
            writer.check()
    assert value_of(store) == 1.0
    if isinstance(error, ConnectionError):
        writer.take(Position(3), {}, "", {})
        writer.flush()
        assert [taken.position.step for taken in SnapshotCatalog(store).snapshots()] == [3]
    else:
        writer.flush_weights()
    assert value_of(store) == 2.0


def sharded(store: Store, lease: Lease, world: World, gather: Callable[[object], list[Any]]) -> Writer:
    return open_writer(store, lease, world, gather, "digits", 3, lambda path: False, None, True)


WHOLE = {
    "odd": torch.arange(3, dtype=torch.uint8),
    "a": torch.randn(7, 5),
    "one row": torch.randn(1, 3).half(),
    "blocks": torch.randn(33, 4000),
    "wide": torch.randn(5, 2, dtype=torch.complex128),
}
OTHERS = {"statistics": torch.tensor(3), "mask": torch.ones(3, dtype=torch.bool)}


@pytest.mark.parametrize("replicas", [1, 2])
def test_each_rank_writes_its_rows_of_sharded_weights(store: Store, tmp_path: Path, replicas: int) -> None:
    lease = acquire(store, None, {})

    def act(world: World, gather: Callable[[object], list[Any]]) -> None:
        writer, shards = sharded(store, lease, world, gather), world.size // replicas
        rows = {name: shard_rows(tensor, world.rank % shards, shards) for name, tensor in WHOLE.items()}
        rows["tied"] = rows["a"]
        if world.rank >= shards:
            rows = {name: no_rows(one) for name, one in rows.items()}
        for step in (1, 2, 3):
            writer.save_weights("best", Position(step), {**rows, **({} if world.rank else OTHERS)}, {"step": step})
        writer.flush_weights()

    assert Ranks(4).run(act) == [None] * 4
    saved = newest_weights(store, "best")
    assert saved is not None
    assert saved.position == Position(3)
    sizes = [saved.manifest["files"][f"{saved.stem(rank)}.safetensors"]["bytes"] for rank in range(4)]
    assert sum(size > 60_000 for size in sizes) == 4 // replicas
    back = load_weights(store, "best").state_dict
    assert differences({**WHOLE, "tied": WHOLE["a"], **OTHERS}, back) == []
    assert back["tied"].data_ptr() == back["a"].data_ptr()
    merged = load_file(download_tensors(store, saved, tmp_path / "merged.safetensors"))
    merged["wide"] = merged["wide"].view(torch.complex128).view(5, 2)  # whose dtype the format has not
    assert differences({**WHOLE, **OTHERS}, {name: merged[name] for name in (*WHOLE, *OTHERS)}) == []
    assert len(merged) == len(WHOLE) + len(OTHERS)


def test_ranks_agree_on_the_weights_that_one_of_them_has_dropped(store: Store) -> None:
    lease, gate, found = acquire(store, None, {}), Gated(), list[list[str]]()

    def act(world: World, gather: Callable[[object], list[Any]]) -> None:
        writer, weights = sharded(store, lease, world, gather), {"w": torch.ones(1)}
        writer.take(Position(1), {}, "", {}, committed=lambda *_: gate("snapshot_write") if world.rank else None)
        writer.save_weights("best", Position(2), weights, {})
        if world.rank:
            assert gate.reached.wait(LIMIT_S)
            writer.save_weights("best", Position(3), weights, {})  # the thread has written none yet
            gate.open.set()
        else:
            writer.flush_weights()
            found.append(store.list("best"))
            writer.save_weights("best", Position(3), weights, {})
        writer.flush_weights()

    assert Ranks(2).run(act) == [None] * 2
    assert found == [[]]
    assert store.list("best") == ["000000000003-g000001"]


def test_weights_that_ranks_agreed_to_write_are_not_dropped(store: Store) -> None:
    lease = acquire(store, None, {})

    def act(world: World, gather: Callable[[object], list[Any]]) -> None:
        newer: list[str] = []

        def save(step: int) -> str:
            return writer.save_weights("best", Position(step), {"w": torch.full((1,), float(step))}, {})

        def gather_slowly(value: object) -> list[Any]:
            answers = gather(value)
            if world.rank and not newer:  # training goes on while the thread of this rank exchanges
                newer.append("")
                newer[0] = save(2)
            return answers

        writer = sharded(store, lease, world, gather_slowly)
        save(1)
        writer.flush_weights()
        newer = newer or [save(2)]
        writer.flush_weights()
        assert newer == ["000000000002-g000001"]

    assert Ranks(2).run(act) == [None] * 2
    assert value_of(store) == 2.0
