"""Background writing: training copies and goes on; what is committed is the state at the boundary, or nothing is."""

import contextlib
import errno
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from unit.writers import alone, take

from midstride.engine.errors import SnapshotError, Superseded
from midstride.engine.snapshots.buffer_pool import LONG_WAIT_S, Buffer, BufferPool
from midstride.engine.snapshots.catalog import Position, SnapshotCatalog
from midstride.engine.snapshots.lease import acquire
from midstride.engine.snapshots.reader import read
from midstride.engine.snapshots.staging import Stager
from midstride.engine.snapshots.weights import load_weights
from midstride.engine.snapshots.writer import Writer
from midstride.engine.state.codec import differences
from midstride.engine.storage import local
from midstride.engine.storage.checksums import decode_document, encode_document
from midstride.engine.storage.local import LocalStore
from midstride.engine.storage.s3 import S3Store
from midstride.engine.storage.store import Store
from midstride.engine.world import World


class Gated:
    """A probe at which the writer waits until it is let through."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, phase: str) -> None:
        if phase == "snapshot_write":
            self.reached.set()
            assert self.open.wait(100)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "run")


@pytest.fixture
def writer(store: Store) -> Iterator[Writer]:
    writer = Writer(store, acquire(store, None, {}), World(), lambda value: [value], "digits", 100)
    yield writer
    assert writer.close(100)


# --- the buffers ---------------------------------------------------------------------------------------------------


def test_a_buffer_keeps_its_memory_and_grows_when_it_must() -> None:
    buffer = Buffer()
    first = buffer.reserve(10_000)
    assert (first.numel(), first.dtype, first.data_ptr() % 4096) == (10_000, torch.uint8, 0)
    assert buffer.reserve(100).data_ptr() == buffer.reserve(len(buffer)).data_ptr() == first.data_ptr()
    assert buffer.reserve(len(buffer) + 1).numel() == len(first) // 4096 * 4096 + 4096 + 1


def test_the_second_buffer_is_made_when_it_is_needed_and_then_there_are_two() -> None:
    pool = BufferPool()
    first, waited_s = pool.acquire()
    pool.release(first)
    assert pool.acquire() == (first, waited_s) == (first, 0.0)
    second, _ = pool.acquire()
    assert second is not first
    got: list[Buffer] = []
    waiting = threading.Thread(target=lambda: got.append(pool.acquire()[0]))
    waiting.start()
    waiting.join(0.1)
    assert not got
    pool.release(second)
    waiting.join(100)
    assert got == [second]


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


# --- what is committed ----------------------------------------------------------------------------------------------

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
    staged = Stager(World(), lambda name: False).stage(tree, Buffer())
    (tmp_path / "file").write_bytes(staged.data)
    back = load_file(tmp_path / "file")
    assert differences(dict(sorted(tree.items())), dict(sorted(back.items()))) == []


def test_a_snapshot_of_the_same_tensors_uses_the_same_memory() -> None:
    stager, buffer, tree = Stager(World(), lambda name: False), Buffer(), {"w": torch.ones(5), "t": torch.ones(3)}
    first = stager.stage(tree, buffer).data
    at = torch.frombuffer(first, dtype=torch.uint8).data_ptr()
    tree["w"].fill_(2.0)
    tree["t"] = torch.full((3,), 3.0)  # a new tensor in an old place
    again = stager.stage(tree, buffer).data
    assert torch.frombuffer(again, dtype=torch.uint8).data_ptr() == at
    assert differences(read_bytes(again), tree) == []


def read_bytes(data: memoryview) -> dict[str, torch.Tensor]:
    from safetensors.torch import load

    return load(bytes(data))


# --- waiting, errors, the end ---------------------------------------------------------------------------------------


def test_training_goes_on_while_two_are_written_and_waits_with_the_third(
    writer: Writer, store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = [Gated() for _ in range(3)]
    pending = [writer.take(Position(n), {"w": torch.full((8,), n)}, "", {}, gates[n]) for n in range(2)]
    assert gates[0].reached.wait(100)
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


def test_they_are_told_as_committed_in_the_order_in_which_they_were_taken(writer: Writer, store: Store) -> None:
    told: list[Any] = []
    for step in range(5):
        writer.take(
            Position(step),
            {"w": torch.ones(3)},
            "",
            {},
            committed=lambda pending, snapshot: told.append(
                (pending.position, snapshot, SnapshotCatalog(store).newest_good())
            ),
        )
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


def test_a_closed_writer_leaves_no_thread(store: Store) -> None:
    before = threading.active_count()
    writer = Writer(store, acquire(store, None, {}), World(), lambda value: [value], "digits", 100)
    assert threading.active_count() == before + 1
    assert writer.close(100)
    assert threading.active_count() == before


# --- weights --------------------------------------------------------------------------------------------------------


def value_of(store: Store, folder: str = "best") -> float:
    return float(load_weights(store, folder).state_dict["w"][0])


def refuse(error: OSError, prefix: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no file be written whose path begins with `prefix`."""
    write = LocalStore.write

    def refusing(self: LocalStore, path: str, data: Any, **options: Any) -> None:
        if path.startswith(prefix):
            raise error
        write(self, path, data, **options)

    monkeypatch.setattr(LocalStore, "write", refusing)


def test_weights_are_those_of_the_moment_and_the_newest_win(writer: Writer, store: Store) -> None:
    gate, weights = Gated(), {"w": torch.ones(9)}
    writer.take(Position(1), {}, "", {}, gate)
    assert gate.reached.wait(100)
    for step in (1, 2, 3):  # they come while the thread is busy
        weights["w"].fill_(step)
        writer.save_weights("best", Position(step), weights, {"val/loss": 1.0}, {"step": step})
    weights["w"].fill_(7)
    writer.save_weights("last", Position(7), weights, {}, {"step": 7})
    weights["w"].fill_(9)
    assert store.list("best") == []
    gate.open.set()
    writer.flush_weights()
    assert (value_of(store), value_of(store, "last")) == (3.0, 7.0)
    assert load_weights(store, "best").metrics == {"val/loss": 1.0}


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
def test_a_world_that_sleeps_anywhere_while_it_writes_weights_changes_nothing_that_is_read(
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
    older.save_weights("best", Position(1), {"w": torch.ones(3)}, {}, {"step": 1})
    (first,) = take(older, 1)

    def finish() -> None:
        newer = alone(store, first.name, keep=1)
        newer.save_weights("best", Position(2), {"w": torch.full((3,), 20.0)}, {}, {"step": 2})
        newer.save_weights("last", Position(2), {"w": torch.full((3,), 21.0)}, {}, {"step": 2})
        take(newer, 2)

    sleeper = Interrupted(number, finish)
    for owner, name in seams:
        sleeper.wrap(owner, name, patch)
    sleeper.thread = older._thread.ident or 0
    older.save_weights("best", Position(3), {"w": torch.full((3,), 3.0)}, {}, {"step": 3})
    older.save_weights("best", Position(4), {"w": torch.full((3,), 4.0)}, {}, {"step": 4})
    with contextlib.suppress(Superseded, SnapshotError):
        older.flush_weights()
        older.take(Position(5), {}, "", {})
        older.save_weights("best", Position(6), {"w": torch.full((3,), 6.0)}, {}, {"step": 6})
        older.save_weights("last", Position(6), {"w": torch.full((3,), 6.0)}, {}, {"step": 6})
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


def test_weights_beyond_the_snapshot_that_a_newer_world_resumed_from_do_not_count(store: Store) -> None:
    older = alone(store)
    older.save_weights("best", Position(1), {"w": torch.ones(3)}, {}, {"step": 1})
    (first,) = take(older, 1)
    older.save_weights("best", Position(3), {"w": torch.full((3,), 3.0)}, {}, {"step": 3})
    older.flush_weights()
    assert value_of(store) == 3.0
    alone(store, first.name)
    assert value_of(store) == 1.0


@pytest.mark.parametrize("error", [ConnectionError("nobody answers"), OSError(errno.ENOSPC, "No space left on device")])
def test_weights_that_cannot_be_written_stay_and_go_before_the_next_snapshot(
    error: OSError, writer: Writer, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer.save_weights("best", Position(1), {"w": torch.ones(3)}, {}, {"step": 1})
    writer.flush_weights()
    with monkeypatch.context() as patch:
        refuse(error, "best/", store, patch)
        writer.save_weights("best", Position(2), {"w": torch.full((3,), 2.0)}, {}, {"step": 2})
        with pytest.raises(type(error)):
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


def test_weights_as_an_older_version_wrote_them_are_read_and_give_way(writer: Writer, store: Store) -> None:
    writer.save_weights("best", Position(1), {"w": torch.ones(3)}, {}, {"step": 1})
    writer.flush_weights()
    (name,) = [file for file in store.list("best") if file.endswith(".json")]
    manifest = decode_document(store.read(f"best/{name}"), name)
    ((file, facts),) = manifest["files"].items()
    old = f"weights-{1:012d}-{facts['xxh3_128'][:8]}.safetensors"
    store.write(f"best/{old}", store.read(f"best/{file}"))
    known = {key: manifest[key] for key in ("format", "metrics", "facts", "state_dict", "time")}
    store.write("best/manifest.json", encode_document({**known, "files": {old: facts}}))
    for path in (name, file):
        store.remove(f"best/{path}")
    newer = alone(store, keep=1)
    assert value_of(store) == 1.0
    take(newer, 1)
    assert value_of(store) == 1.0
    newer.save_weights("best", Position(2), {"w": torch.full((3,), 2.0)}, {}, {"step": 2})
    take(newer, 2, 3)
    assert value_of(store) == 2.0
    assert all("-g000002" in path for path in store.list("best"))


# --- past the page cache --------------------------------------------------------------------------------------------

SIZES = [2**20 - 1, 2**20, 2**20 + 1, 2**20 + 4096, 9 * 2**20 + 4097]


@pytest.fixture
def random_memory() -> torch.Tensor:
    memory = Buffer().reserve(max(SIZES) + 4096)
    return memory.random_(0, 256, generator=torch.Generator().manual_seed(1))


@pytest.mark.disk
@pytest.mark.parametrize("shift", [0, 1, 512])
@pytest.mark.parametrize("size", SIZES)
def test_files_of_any_size_and_place_are_written_whole(
    size: int, shift: int, tmp_path: Path, random_memory: torch.Tensor
) -> None:
    data = random_memory[shift : shift + size].numpy().data
    Store.open(tmp_path).write("file", data)
    assert (tmp_path / "file").read_bytes() == bytes(data)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.disk
def test_a_file_system_that_wants_other_alignments_is_written_through_the_cache(
    tmp_path: Path, random_memory: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, write = [], os.write

    def picky(handle: int, data: Any) -> int:
        if local.fcntl.fcntl(handle, local.fcntl.F_GETFL) & os.O_DIRECT and len(data) > 4096:
            refused.append(len(data))
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(handle, data)

    monkeypatch.setattr(os, "write", picky)
    data = random_memory.numpy().data
    Store.open(tmp_path).write("file", data)
    assert refused
    assert (tmp_path / "file").read_bytes() == bytes(data)


@pytest.mark.disk
def test_a_file_system_without_it_is_written_through_the_cache(
    tmp_path: Path, random_memory: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    real: Callable[..., int] = local.fcntl.fcntl

    def refuse(handle: int, command: int, *arguments: int) -> int:
        if command == local.fcntl.F_SETFL:
            asked.append(handle)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(handle, command, *arguments)

    monkeypatch.setattr(local.fcntl, "fcntl", refuse)
    data = random_memory.numpy().data
    Store.open(tmp_path).write("file", data)
    assert asked
    assert (tmp_path / "file").read_bytes() == bytes(data)


def test_long_files_are_hashed_while_they_are_written(writer: Writer, store: Store) -> None:
    tree = {"w": torch.randn(600_000)}
    snapshot = writer.take(Position(1), tree, "", {}).future.result(100)
    SnapshotCatalog(store).verify(snapshot)
    assert differences(tree, read(store, snapshot, 0)) == []
    assert json.loads(json.dumps(snapshot.manifest)) == snapshot.manifest
