"""Snapshots of three ranks: all of them, or none."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_threads import Ranks
from support.snapshot_writers import open_writer

from midstride.engine.errors import SnapshotError, StoreFull, StoreSilent, Superseded, UnsupportedState
from midstride.engine.snapshots.catalog import Position, Snapshot, SnapshotCatalog
from midstride.engine.snapshots.lease import Lease, acquire
from midstride.engine.snapshots.reader import read
from midstride.engine.snapshots.state_copy import assign_ranks
from midstride.engine.state.differences import differences
from midstride.engine.storage.store import Store
from midstride.engine.world import World


def state_of(rank: int, shift: float = 0.0) -> dict[str, Any]:
    module = {f"layer{i}.weight": torch.full((10 * (i + 1), 7), float(i) + shift).t() for i in range(5)}
    return {"module": module, "metrics": {"total": torch.tensor(float(rank))}, "rng": torch.arange(rank + 2)}


def take_with(
    store: Store,
    lease: Lease,
    state: Callable[[int], Any] = state_of,
    replicated: Callable[[str], bool] = lambda path: path.startswith("module/"),
    probes: dict[int, Callable[[str], object]] | None = None,
) -> list[Any]:
    def act(world: World, gather: Callable[[object], list[Any]]) -> Snapshot:
        writer = open_writer(store, lease, world, gather, "digits", 3, replicated)
        probe = (probes or {}).get(world.rank, lambda phase: None)
        return writer.take(Position(4), state(world.rank), "4,row\n", {}, probe).future.result()

    return Ranks(3).run(act)


def test_three_ranks_write_one_snapshot(store: Store):
    taken = take_with(store, acquire(store, None, {}))
    assert taken[0] == taken[1] == taken[2] == SnapshotCatalog(store).newest_good()
    for rank in range(3):
        back = read(store, taken[0], rank)
        assert differences(state_of(rank), back) == []
        assert back["module"]["layer1.weight"].stride() == state_of(0)["module"]["layer1.weight"].stride()
    with pytest.raises(SnapshotError, match="taken by 3 ranks, it has no files of rank 3"):
        read(store, taken[0], 3)


def test_replicated_tensors_are_written_once_and_dealt_by_size(store: Store):
    (snapshot, *_) = take_with(store, acquire(store, None, {}))
    sizes = [snapshot.manifest["files"][f"rank-0000{rank}-of-00003.safetensors"]["bytes"] for rank in range(3)]
    whole = sum(tensor.nbytes for tensor in state_of(0)["module"].values())
    assert whole < sum(sizes) < 1.6 * whole + 1500  # the rest is headers and what each rank has of its own
    assert max(sizes) < 0.6 * sum(sizes)


def test_dealing_is_fair_and_repeatable():
    sizes = {f"t{number}": number * 10 for number in range(20)}
    dealt = assign_ranks(sizes, 3)
    assert dealt == assign_ranks(dict(reversed(sizes.items())), 3)
    loads = [sum(sizes[name] for name, rank in dealt.items() if rank == mine) for mine in range(3)]
    assert max(loads) - min(loads) <= 30
    assert assign_ranks({}, 3) == {}


def _fail(words: str, at: str = "snapshot_write", number: int = errno.EIO) -> Callable[[str], None]:
    def probe(phase: str) -> None:
        if phase == at:
            raise OSError(number, words)

    return probe


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("phase", ["snapshot_write", "before_commit"])
def test_an_error_of_one_rank_reaches_all(store: Store, rank: int, phase: str):
    errors = take_with(store, acquire(store, None, {}), probes={rank: _fail("Broken disk", phase)})
    for error in errors:
        assert type(error) is SnapshotError
        assert f"rank {rank} says: OSError: [Errno 5] Broken disk" in str(error)
    assert isinstance(errors[rank].__cause__, OSError)
    if phase == "snapshot_write" or rank == 0:
        assert store.find("snapshots") == {}, "what was not committed is removed"
    elif (committed := SnapshotCatalog(store).newest_good()) is not None:
        assert differences(state_of(1), read(store, committed, 1)) == [], "the commit may come before the error"


@pytest.mark.parametrize(
    ("number", "kind", "way_out"),
    [
        (errno.ENOSPC, StoreFull, "Free some space: the same command then resumes the run"),
        (errno.EDQUOT, StoreFull, "Free some space: the same command then resumes the run"),
        (errno.EROFS, SnapshotError, "It is mounted read-only"),
        (errno.EMFILE, SnapshotError, "Raise the limit on open files"),
        (errno.EFBIG, SnapshotError, "Raise the limit on the size of a file"),
    ],
)
def test_a_full_disk_is_named_with_a_way_out(store: Store, number: int, kind: type[Exception], way_out: str):
    errors = take_with(store, acquire(store, None, {}), probes={1: _fail("No room", number=number)})
    assert [type(error) for error in errors] == [kind] * 3
    said = f"rank 1 says: {store.url} cannot be written: [Errno {number}] No room. {way_out}"
    assert all(said in str(error) for error in errors)


def test_unwritable_state_is_one_error_on_all_ranks(store: Store):
    errors = take_with(store, acquire(store, None, {}), lambda rank: {"hook": print} if rank == 1 else state_of(rank))
    assert [type(error) for error in errors] == [UnsupportedState] * 3
    assert all("rank 1 says" in str(error) and "hook: " in str(error) for error in errors)
    assert store.find("snapshots") == {}


def test_ranks_that_differ_in_replicas_are_refused(store: Store):
    def state(rank: int) -> Any:
        return {"module": {"a": torch.ones(2), **({"b": torch.ones(3)} if rank == 2 else {})}}

    errors = take_with(store, acquire(store, None, {}), state)
    assert all(
        type(error) is SnapshotError and "rank 2 and rank 0 do not hold the same" in str(error) for error in errors
    )


def test_a_store_that_ranks_do_not_share_is_refused(store: Store, tmp_path: Path):
    lease = acquire(store, None, {})

    def act(world: World, gather: Callable[[object], list[Any]]) -> Snapshot:
        own = store if world.is_first else Store.open(tmp_path / f"node{world.rank}")
        return (
            open_writer(own, lease, world, gather, "digits", 3)
            .take(Position(4), state_of(world.rank), "", {})
            .future.result()
        )

    errors = Ranks(3).run(act)
    assert all("rank 0 sees no such file: all ranks must share one store" in str(error) for error in errors)


def test_superseded_reaches_every_rank(store: Store):
    lease = acquire(store, None, {})
    acquire(store, None, {})
    errors = take_with(store, lease)
    assert [type(error) for error in errors] == [Superseded] * 3
    assert all(str(error).startswith("another attempt ") for error in errors), "nothing is wrong with the store"
    assert store.find("snapshots") == {}, "no later attempt may come, which would remove it"


def test_a_world_of_a_replaced_run_removes_nothing(store: Store):
    """A snapshot that the other run is about to commit may have the very name."""
    lease = acquire(store, None, {})
    store.remove("lease")
    acquire(store, None, {})
    errors = take_with(store, lease)
    assert [type(error) for error in errors] == [Superseded] * 3
    assert "another run has started there" in str(errors[0])
    assert store.find("snapshots")


def test_what_a_silent_store_may_hold_is_not_removed(store: Store):
    errors = take_with(store, acquire(store, None, {}), probes={1: _fail("no answer", number=errno.ETIMEDOUT)})
    assert [type(error) for error in errors] == [StoreSilent] * 3
    assert store.find("snapshots"), "to remove it would be to wait for the store again"
