"""Local files: written past the page cache, and whole or as they were before."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.limit import LIMIT_S

from midstride.engine.snapshots.buffer_pool import Buffer
from midstride.engine.snapshots.catalog import Position, SnapshotCatalog
from midstride.engine.snapshots.reader import read
from midstride.engine.snapshots.writer import Writer
from midstride.engine.state.differences import differences
from midstride.engine.storage import local
from midstride.engine.storage.draft import draft_of
from midstride.engine.storage.store import Store

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
def test_other_alignments_are_written_through_the_cache(
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
    snapshot = writer.take(Position(1), tree, "", {}).future.result(LIMIT_S)
    SnapshotCatalog(store).verify(snapshot)
    assert differences(tree, read(store, snapshot, 0)) == []
    assert json.loads(json.dumps(snapshot.manifest)) == snapshot.manifest


def test_a_file_is_replaced_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("before")
    with draft_of(path) as draft:
        draft.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def fill_disk(path: Path) -> None:
    with draft_of(path) as draft:
        draft.write_text("aft")
        raise OSError("no space")


def test_of_a_file_that_could_not_be_written_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("before")
    with pytest.raises(OSError, match="no space"):
        fill_disk(path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_files_are_written_where_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(local._thread, "start_new_thread", refuse)
    before = len([*Path("/proc/self/fd").iterdir()])
    Store.open(tmp_path).write_all("folder", [("a", b"1"), ("b", b"2")])
    assert [(tmp_path / "folder" / name).read_bytes() for name in "ab"] == [b"1", b"2"]
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_a_wait_for_durability_that_a_signal_ends_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    syncs, release = local._Syncs(), local.threading.Event()
    syncs.begin(lambda given: release.wait(LIMIT_S), None)
    wait = local.threading.Event.wait

    def interrupted(event: Any, limit_s: float | None = None) -> bool:
        monkeypatch.undo()
        release.set()
        assert wait(event, LIMIT_S)
        raise KeyboardInterrupt

    monkeypatch.setattr(local.threading.Event, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        syncs.wait()
    syncs.finish()
