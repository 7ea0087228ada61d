"""A kill or an error at any call by which a life of a run touches its disk: nothing that was committed is lost."""

import contextlib
import errno
import fcntl
import gc
import os
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from support.snapshot_writers import OPEN, alone, state_at, take

from midstride.engine.snapshots.catalog import Position, SnapshotCatalog
from midstride.engine.snapshots.reader import load_weights, read
from midstride.engine.snapshots.writer import Writer
from midstride.engine.state.differences import differences
from midstride.engine.storage.store import Store

#: all through which a local store asks something of the kernel
CALLS: list[tuple[Any, str]] = [
    *((os, name) for name in ("open", "write", "fsync", "listdir", "walk")),
    *((Path, name) for name in ("replace", "unlink", "mkdir", "hardlink_to", "read_bytes", "open", "stat")),
    (shutil, "rmtree"),
    (fcntl, "fcntl"),
]
#: what befalls -> whether the life may get over it
KINDS = {"killed": False, errno.EIO: True, errno.ENOSPC: True}
KILLED, OVER = 9, 0


def life(store: Store) -> None:
    """Resume from step 1 and take two snapshots, with weights, of which one stays."""
    writer = alone(store, SnapshotCatalog(store).snapshots()[-1].name, keep=1)
    for step in (2, 3):
        keep_best(writer, step)
        take(writer, step)
    writer.save_weights("last", Position(3), {"w": torch.full((3,), 3.0)}, {"step": 3})
    writer.flush_weights()


def keep_best(writer: Writer, step: int) -> None:
    weights = {"w": torch.full((3,), float(step))}
    writer.save_weights("best", Position(step), weights, {"step": step})


def lived(store: Store, strike: Callable[[int], None], number: int) -> int:
    """Give the run a life in a process of its own, which is struck before its n-th call; return how it ended."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    gc.freeze()  # buffers of the parent are not mapped here, and collecting them would unmap what lies there now
    counted = count()
    code = OVER
    try:
        for owner, name in CALLS:
            real = getattr(owner, name)

            def struck(*arguments: Any, _real: Any = real, **options: Any) -> Any:
                if next(counted) == number:  # of one thread alone
                    strike(number)
                return _real(*arguments, **options)

            setattr(owner, name, struck)
        with contextlib.suppress(Exception):
            life(store)
        code = OVER if next(counted) > number else KILLED + 1
    finally:
        os._exit(code)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_nothing_committed_is_lost_at_any_call(kind: object, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    every = 1 if request.config.getoption("laws") == "all" else 17
    number, ended = 0, OVER
    first = alone(Store.open(tmp_path / "run"), keep=1)
    keep_best(first, 1)
    take(first, 1)
    close_writers()

    def strike(number: int) -> None:
        if kind == "killed":
            os._exit(KILLED)
        assert isinstance(kind, int)
        raise OSError(kind, os.strerror(kind))

    while True:
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "run", folder)
        ended = lived(Store.open(folder), strike, number)
        if ended == KILLED + 1:
            break
        assert ended == (KILLED if kind == "killed" else OVER), number
        assert_nothing_lost(Store.open(folder), f"at call {number}")
        shutil.rmtree(folder)
        number += every
    assert number > 150


def assert_nothing_lost(store: Store, words: str) -> None:
    """Read what there is, go on from there, and find it all."""
    newest = SnapshotCatalog(store).newest_good()
    assert newest is not None, words
    step = newest.position.step
    assert differences(state_at(step), read(store, newest, 0)) == [], words
    assert all(name < newest.name for name in SnapshotCatalog(store).set_aside_reasons()), words
    writer = alone(store, newest.name, keep=1)
    assert float(load_weights(store, "best").state_dict["w"][0]) == step, words
    assert SnapshotCatalog(store).rows() == [f"{one},row\n" for one in range(1, step + 1)], words
    take(writer, 9)
    assert SnapshotCatalog(store).rows() == [*(f"{one},row\n" for one in range(1, step + 1)), "9,row\n"], words
    assert float(load_weights(store, "best").state_dict["w"][0]) == step, words
    assert not [path for path in Path(store.url).rglob(".*")], words
    assert len(store.list("best")) == 1, words
    close_writers()


def close_writers() -> None:
    while OPEN:
        assert OPEN.pop().close(10.0)
