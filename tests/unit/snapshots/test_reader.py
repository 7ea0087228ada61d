"""Trees of a snapshot for another number of ranks: read by ranges, and every block verified by one of them."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_threads import Ranks
from support.snapshot_writers import open_writer

from midstride.engine.errors import NotExact, SnapshotDamaged
from midstride.engine.snapshots.catalog import Position, Snapshot
from midstride.engine.snapshots.lease import acquire
from midstride.engine.snapshots.reader import SnapshotReader, read, unread
from midstride.engine.state.differences import differences
from midstride.engine.state.row_shards import shard_rows
from midstride.engine.storage.checksums import BLOCK_BYTES
from midstride.engine.storage.local import LocalStore
from midstride.engine.storage.store import Store
from midstride.engine.world import World

MERGED = ("module", "own")
WORLDS = [(4, 4), (4, 2), (2, 4), (4, 3), (3, 1)]


class CountingStore(LocalStore):
    """A local store that counts the bytes it streams."""

    streamed = 0

    def stream(self, path: str, ranges: Sequence[tuple[int, int]] | None = None) -> Iterator[bytes | memoryview]:
        for chunk in super().stream(path, ranges):
            self.streamed += len(chunk)
            yield chunk


def whole_of(rows: int, columns: int) -> dict[str, torch.Tensor]:
    return {
        name: torch.arange(rows * columns, dtype=torch.float32).view(rows, columns) + i for i, name in enumerate("ab")
    }


def tree_of(rank: int, size: int, whole: dict[str, torch.Tensor], noise: int) -> dict[str, Any]:
    """Row shards, one of them tied; tensors of each rank's own, merged or not; scalars."""
    shards = {name: shard_rows(tensor, rank, size) for name, tensor in whole.items()}
    return {
        "module": {**shards, "tied": shards["a"]},
        "own": {"step": torch.tensor(float(rank)), "seen": [rank]},
        "alone": torch.full((noise,), rank, dtype=torch.uint8),
    }


def take(store: Store, size: int, whole: dict[str, torch.Tensor], noise: int = 0) -> Snapshot:
    lease = acquire(store, None, {})

    def act(world: World, gather: Callable[[object], list[Any]]) -> Snapshot:
        writer = open_writer(store, lease, world, gather, "digits", 3)
        return writer.take(Position(4), tree_of(world.rank, size, whole, noise), "", {}).future.result()

    return Ranks(size).run(act)[0]


def planned(store: Store, snapshot: Snapshot, rank: int, size: int) -> SnapshotReader:
    reader = SnapshotReader(store, snapshot)
    if size == reader.world_size:
        reader.plan(rank)
    else:
        reader.plan_merged(rank, size, MERGED)
    return reader


def expected(rank: int, was: int, now: int, whole: dict[str, torch.Tensor], noise: int) -> list[Any]:
    if was == now:
        return [tree_of(rank, now, whole, noise)]
    module = tree_of(rank, now, whole, noise)["module"]
    trees = [{**tree_of(old, was, whole, noise), "module": module} for old in range(was)]
    return [trees[0], *({name: tree[name] for name in MERGED} for tree in trees[1:])]


@pytest.mark.parametrize(("was", "now"), WORLDS)
def test_a_rank_reads_little_more_than_its_rows(was: int, now: int, tmp_path: Path) -> None:
    store, whole = CountingStore(str(tmp_path)), whole_of(8192, 512)
    snapshot = take(store, was, whole)
    readers, counted = [], [0] * now
    for rank in range(now):
        store.streamed = 0
        readers.append(planned(store, snapshot, rank, now))
        counted[rank] += store.streamed
    everyone = [reader.runs for reader in readers]
    for rank, reader in enumerate(readers):
        store.streamed = 0
        reader.read(unread(snapshot, everyone, rank, now))
        counted[rank] += store.streamed
        assert differences(expected(rank, was, now, whole, 0), reader.trees()) == []
    share = sum(tensor.nbytes for tensor in whole.values()) / now
    assert share < min(counted) <= max(counted) <= 1.1 * share
    assert counted[0] <= 1.05 * max(counted[1:] or counted)


@pytest.mark.parametrize(("was", "now"), [(2, 2), (3, 2), (2, 3)])
def test_a_block_that_no_rank_needs_is_verified(was: int, now: int, tmp_path: Path) -> None:
    store, whole = Store.open(tmp_path), whole_of(300, 500)
    snapshot = take(store, was, whole, noise=150_000)
    assert len(unread(snapshot, [planned(store, snapshot, r, now).runs for r in range(now)], 0, 1)) > was - now

    def read_all() -> None:
        readers = [planned(store, snapshot, rank, now) for rank in range(now)]
        everyone = [reader.runs for reader in readers]
        for rank, reader in enumerate(readers):
            reader.read(unread(snapshot, everyone, rank, now))

    read_all()
    for name, digest in snapshot.manifest["files"].items():
        path = tmp_path / snapshot.path / name
        good = path.read_bytes()
        for start in range(0, max(1, digest["bytes"]), BLOCK_BYTES):
            at = min(start + BLOCK_BYTES, len(good)) - 1
            path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] if good else b"x")
            with pytest.raises(SnapshotDamaged, match=f"{name} has"):
                read_all()
        path.write_bytes(good)
    read_all()


def test_a_tensor_that_one_rank_lacks_cannot_be_put_together(store: Store) -> None:
    lease, whole = acquire(store, None, {}), torch.ones(6, 2)

    def act(world: World, gather: Callable[[object], list[Any]]) -> Snapshot:
        writer = open_writer(store, lease, world, gather, "digits", 3)
        tree = {"module": {} if world.rank == 2 else {"a": shard_rows(whole, world.rank, 3)}}
        return writer.take(Position(4), tree, "", {}).future.result()

    snapshot = Ranks(3).run(act)[0]
    with pytest.raises(NotExact, match=r"module/a, a distributed tensor of \(6, 2\), cannot .* Resume with 3"):
        SnapshotReader(store, snapshot).plan_merged(0, 2, MERGED)


def test_ranges_are_read_and_verified_on_s3(bucket: str) -> None:
    store, whole = Store.open(f"{bucket}/run"), whole_of(4096, 256)
    snapshot = take(store, 2, whole, noise=150_000)
    for rank in range(3):
        reader = planned(store, snapshot, rank, 3)
        reader.read()
        assert differences(expected(rank, 2, 3, whole, 150_000), reader.trees()) == []
    assert differences(tree_of(1, 2, whole, 150_000), read(store, snapshot, 1)) == []
    name = f"{snapshot.path}/{snapshot.stem(1)}.safetensors"
    data = bytearray(store.read(name))
    data[len(data) // 2] ^= 1
    store.write(name, bytes(data))
    damaged = planned(store, snapshot, 1, 3)
    with pytest.raises(SnapshotDamaged, match=r"has checksum \w+, its manifest says \w+ \(the block at byte \d+\)"):
        damaged.read()
