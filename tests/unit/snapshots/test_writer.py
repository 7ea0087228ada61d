"""The writer: behind training, in order, and with its errors told."""

import errno
import gc
import json
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, load_file
from support.limit import LIMIT_S
from support.rank_threads import Ranks
from support.slow_stores import Gated
from support.snapshot_writers import open_writer

from midstride.engine.errors import SnapshotError, StoreSilent, UnsupportedState
from midstride.engine.snapshots.buffer_pool import LONG_WAIT_S, Buffer, BufferPool
from midstride.engine.snapshots.catalog import Position, SnapshotCatalog
from midstride.engine.snapshots.lease import acquire
from midstride.engine.snapshots.reader import read
from midstride.engine.snapshots.state_copy import StateCopier
from midstride.engine.snapshots.writer import PendingSnapshot, Writer
from midstride.engine.state.differences import differences
from midstride.engine.storage.checksums import BLOCK_BYTES
from midstride.engine.storage.local import LocalStore
from midstride.engine.storage.store import Store
from midstride.engine.world import World


def test_a_buffer_keeps_its_memory_and_grows_when_it_must() -> None:
    buffer = Buffer()
    first = buffer.reserve(10_000)
    assert (first.numel(), first.dtype, first.data_ptr() % 4096) == (10_000, torch.uint8, 0)
    assert buffer.reserve(100).data_ptr() == buffer.reserve(len(buffer)).data_ptr() == first.data_ptr()
    assert buffer.reserve(len(buffer) + 1).numel() == len(first) // 4096 * 4096 + 4096 + 1


def test_a_second_buffer_is_made_when_it_is_needed() -> None:
    pool = BufferPool()
    first, waited_s = pool.acquire()
    pool.release(first)
    assert pool.acquire() == (first, waited_s) == (first, 0.0)
    second, _ = pool.acquire()
    assert second is not first
    pool.release(second)
    assert pool.acquire() == (second, 0.0)


def test_forked_workers_do_not_inherit_a_buffer() -> None:
    memory = Buffer().reserve(1 << 20)
    (area,) = [area for area in _areas() if area["start"] <= memory.data_ptr() < area["end"]]
    assert "dc" in area["VmFlags"]  # do not copy on fork


def _areas() -> list[dict[str, Any]]:
    areas: list[dict[str, Any]] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            start, end = (int(part, 16) for part in head.split("-"))
            areas.append({"start": start, "end": end})
        elif head == "VmFlags:":
            areas[-1]["VmFlags"] = line.split()[1:]
    return areas


SHAPES = st.lists(st.integers(0, 5), max_size=3)


DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])


TENSORS = st.lists(st.tuples(SHAPES, DTYPES, st.booleans()), min_size=1, max_size=6)


def _filled(tensor: torch.Tensor, value: int) -> None:
    with torch.no_grad():
        tensor.fill_(value % 2 if tensor.dtype == torch.bool else value)


@settings(max_examples=25)
@given(tensors=TENSORS, resized=st.booleans())
def test_what_is_committed_is_the_state_at_the_boundary(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[Any], resized: bool
) -> None:
    """Training changes every tensor in place right after, while nothing is written yet."""
    store = Store.open(tmp_path_factory.mktemp("run"))
    writer = Writer(store, acquire(store, None, {}), World(), lambda value: [value], "digits", 100)
    state: dict[str, Any] = {
        str(n): torch.zeros(shape, dtype=dtype).t() if turned and len(shape) == 2 else torch.zeros(shape, dtype=dtype)
        for n, (shape, dtype, turned) in enumerate(tensors)
    }
    state["tied"], state["plain"] = state["0"], [0]
    gates = [Gated() for _ in range(2)]
    expected = []
    try:
        for step, gate in enumerate(gates, 1):
            for tensor in (value for value in state.values() if isinstance(value, torch.Tensor)):
                _filled(tensor, step)
            state["plain"][0] = step
            if resized and step == 2:
                state["0"] = torch.full((17,), 2.0)
            expected.append({k: v.clone() if isinstance(v, torch.Tensor) else list(v) for k, v in state.items()})
            writer.take(Position(step), state, "", {}, gate)
        for value in state.values():
            _filled(value, 7) if isinstance(value, torch.Tensor) else value.clear()
        for gate in gates:
            gate.open.set()
        writer.flush()
    finally:
        assert writer.close(100)
    for snapshot, tree in zip(SnapshotCatalog(store).snapshots(), expected, strict=True):
        assert differences(tree, read(store, snapshot, 0)) == []


def test_tensors_that_move_or_come_to_share_memory_are_seen(writer: Writer, store: Store) -> None:
    """The layout of the snapshot before is used again only where it still holds."""
    base = torch.arange(12.0)
    trees: list[dict[str, Any]] = [
        {"a": torch.ones(3), "b": torch.zeros(3)},
        {"a": torch.full((3,), 2.0), "b": torch.full((3,), 3.0)},  # elsewhere
        {"a": base[:3], "b": base[1:4]},  # overlapping now
        {"a": base[:3], "b": base[2:5]},  # otherwise
        {"a": base[:3], "b": base[:3]},
        {"a": base[::4], "b": base[1::4]},  # strided
    ]
    trees += [trees[0], {"a": torch.randn(2, 3).t()}, {"a": torch.randn(64, 3)[:, 0], "c": torch.eye(2)}]
    for step, tree in enumerate(trees, 1):
        writer.take(Position(step), tree, "", {})
    writer.flush()
    for snapshot, tree in zip(SnapshotCatalog(store).snapshots(), trees, strict=True):
        back = read(store, snapshot, 0)
        assert differences(tree, back) == []
        if "b" in tree:
            apart = back["a"].data_ptr() - back["b"].data_ptr()
            shares = tree["a"].untyped_storage().data_ptr() == tree["b"].untyped_storage().data_ptr()
            assert not shares or step == 6 or apart == tree["a"].data_ptr() - tree["b"].data_ptr()


def test_a_file_is_what_safetensors_writes(tmp_path: Path) -> None:
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
    tree = {f"t{n}": torch.ones(n + 1, 3).to(kind) for n, kind in enumerate(kinds)} | {"empty": torch.zeros(0, 4)}
    state = StateCopier(World(), lambda name: False).copy(tree, Buffer())
    (tmp_path / "file").write_bytes(state.data)
    back = load_file(tmp_path / "file")
    assert differences(dict(sorted(tree.items())), dict(sorted(back.items()))) == []


def test_tensors_of_whole_blocks_share_no_block_with_others() -> None:
    whole = {"d": torch.ones(256, 64), "a": torch.ones(128, 128, dtype=torch.float64)}
    others = {"b": torch.ones(5, 4, 1000), "c": torch.ones(7), "e": torch.ones(9000, 8, dtype=torch.uint8)}
    data = StateCopier(World(), lambda name: False).copy({**whole, **others}, Buffer()).data
    entries = json.loads(data[8 : 8 + (length := int.from_bytes(data[:8], "little"))].tobytes())
    starts = {name: 8 + length + entry["data_offsets"][0] for name, entry in entries.items()}
    assert all(starts[name] % BLOCK_BYTES == 0 for name in whole)
    assert min(starts[name] for name in others) == BLOCK_BYTES * 4


def test_a_snapshot_of_the_same_tensors_uses_the_same_memory() -> None:
    copier, buffer, tree = StateCopier(World(), lambda name: False), Buffer(), {"w": torch.ones(5), "t": torch.ones(3)}
    first = copier.copy(tree, buffer).data
    at = torch.frombuffer(first, dtype=torch.uint8).data_ptr()
    tree["w"].fill_(2.0)
    tree["t"] = torch.full((3,), 3.0)  # a new tensor in an old place
    again = copier.copy(tree, buffer).data
    assert torch.frombuffer(again, dtype=torch.uint8).data_ptr() == at
    assert differences(load(bytes(again)), tree) == []


def test_training_continues_beside_two_and_waits_with_the_third(
    writer: Writer, store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = [Gated() for _ in range(3)]
    pending = [writer.take(Position(n), {"w": torch.full((8,), n)}, "", {}, gates[n]) for n in range(2)]
    assert gates[0].reached.wait(LIMIT_S)
    assert writer.is_busy
    assert [pending.wait_s for pending in pending] == [0.0, 0.0]
    # It is told of a wait that has become long; only then is the first written.
    monkeypatch.setattr(writer._buffers, "_on_wait", lambda waited_s, why: gates[0].open.set())
    third = writer.take(Position(2), {"w": torch.full((8,), 2)}, "", {}, gates[2])
    assert pending[0].future.done()
    assert third.stall_s >= third.wait_s > LONG_WAIT_S
    assert re.search(r"training waited \d+\.\d s", caplog.text)
    for gate in gates:
        gate.open.set()
    writer.flush()
    assert not writer.is_busy
    assert [snapshot.position.step for snapshot in SnapshotCatalog(store).snapshots()] == [0, 1, 2]


def test_where_a_snapshot_was_dropped_one_is_taken_anew_and_once(writer: Writer, store: Store) -> None:
    def silent(phase: str) -> None:
        raise ConnectionError("no answer")

    def take(rows: str = "", probe: Any = lambda phase: None) -> PendingSnapshot:
        return writer.take(Position(1), {"w": torch.ones(3)}, rows, {}, probe)

    dropped = [take("step\n1\n", silent)]
    while len(dropped) < 3:
        with pytest.raises(StoreSilent):
            dropped[-1].future.result()
        # As if only the answer to its manifest had been lost.
        store.write("snapshots/000000000001-g000001/manifest.json", b"{}")
        dropped.append(take("", silent if len(dropped) == 1 else lambda phase: None))
    anew = dropped.pop()
    assert take() is anew
    assert anew not in dropped
    committed, catalog = anew.future.result(), SnapshotCatalog(store)
    assert catalog.snapshots() == [committed]
    catalog.verify(committed)
    assert catalog.rows() == ["step\n1\n"]


def test_a_rank_that_waits_for_a_snapshot_raises_its_failure(writer: Writer) -> None:
    asked = threading.Event()

    def fail(phase: str) -> None:
        assert asked.wait(LIMIT_S)
        raise ValueError("broken")

    def exception(timeout: float | None = None) -> BaseException | None:
        asked.set()
        return of_first(timeout)

    first = writer.take(Position(1), {}, "", {}, fail)
    of_first = first.future.exception
    vars(first.future)["exception"] = exception
    with pytest.raises(Exception, match="broken"):
        writer.take(Position(1), {}, "", {})


def test_all_ranks_take_a_dropped_snapshot_anew(store: Store) -> None:
    lease, asks, met = acquire(store, None, {}), threading.Event(), threading.Barrier(2, timeout=LIMIT_S)
    is_anew = list[bool]()

    def act(world: World, gather: Callable[[object], list[Any]]) -> None:
        def silent(phase: str) -> None:
            raise ConnectionError("no answer")

        def gather_late(value: object) -> list[Any]:
            answers = gather(value)
            assert world.is_first or asks.wait(LIMIT_S)  # its thread learns late that rank 0's store is silent
            return answers

        def exception(timeout: float | None = None) -> BaseException | None:
            asks.set()
            return of_first(timeout)

        writer = open_writer(store, lease, world, gather_late, "digits", 3)
        first = writer.take(Position(1), {}, "", {}, silent if world.is_first else lambda phase: None)
        of_first = first.future.exception
        if world.is_first:
            assert isinstance(of_first(LIMIT_S), StoreSilent)
        else:
            vars(first.future)["exception"] = exception
        is_anew.append(writer.take(Position(1), {}, "", {}) is not first)
        asks.set()
        met.wait()
        if all(is_anew):
            writer.flush()

    assert Ranks(2).run(act) == [None] * 2
    assert is_anew == [True] * 2
    assert len(SnapshotCatalog(store).snapshots()) == 1


def test_commits_are_reported_in_order(writer: Writer, store: Store) -> None:
    told: list[Any] = []

    def note(pending: PendingSnapshot, snapshot: Any) -> None:
        told.append((pending.position, snapshot, SnapshotCatalog(store).newest_good()))

    for step in range(5):
        writer.take(Position(step), {"w": torch.ones(3)}, "", {}, committed=note)
    writer.flush()
    assert [position.step for position, _, _ in told] == list(range(5))
    assert all(snapshot == newest for _, snapshot, newest in told)
    assert threading.get_ident() != writer._thread.ident


def _no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_error_of_the_writer_reaches_training_with_its_cause(
    writer: Writer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.take(Position(1), {"w": torch.ones(3)}, "", {})
    writer.flush()
    writer.check()
    monkeypatch.setattr(LocalStore, "write", _no_space)
    failing = writer.take(Position(2), {"w": torch.ones(3)}, "", {})
    assert isinstance(failing.future.exception(100), SnapshotError)
    monkeypatch.undo()
    for ask in (writer.check, writer.flush, lambda: writer.take(Position(3), {}, "", {})):
        with pytest.raises(SnapshotError, match=r"000000000002-g000001 was not taken.*No space left") as caught:
            ask()
        assert isinstance(caught.value.__cause__, OSError)
    assert [snapshot.position.step for snapshot in SnapshotCatalog(store).snapshots()] == [1]


def test_after_an_error_nothing_newer_is_committed(writer: Writer, store: Store) -> None:
    def fail(phase: str) -> None:
        gate(phase)
        raise OSError(errno.EIO, "a bad disk")

    gate = Gated()
    first = writer.take(Position(1), {"w": torch.ones(3)}, "", {}, fail)
    second = writer.take(Position(2), {"w": torch.ones(3)}, "", {})
    gate.open.set()
    assert "a bad disk" in str(first.future.exception(100))
    assert "an older snapshot was not taken" in str(second.future.exception(100))
    assert SnapshotCatalog(store).snapshots() == []


def test_a_writer_that_hangs_is_left_behind(store: Store) -> None:
    writer = Writer(store, acquire(store, None, {}), World(), lambda value: [value], "digits", 100)
    gate = Gated()
    writer.take(Position(1), {"w": torch.ones(3)}, "", {}, gate)
    assert not writer.close(0.05)  # else it would wait for the gate, which is opened below
    assert SnapshotCatalog(store).snapshots() == []
    gate.open.set()
    assert writer.close(100)


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_as_it_was_after_a_copy(is_on: bool) -> None:
    copier = StateCopier(World(), lambda name: False)
    try:
        (gc.enable if is_on else gc.disable)()
        for tree in ({"w": torch.ones(2)}, {"w": object()}):
            with suppress(UnsupportedState):
                copier.copy(tree, Buffer())
            assert gc.isenabled() is is_on
    finally:
        gc.enable()
