"""Where the tests of one run keep their files: in memory where there is room, since a law makes hundreds of fsyncs."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEMORY = Path("/dev/shm")
#: what outlives a restart, so it is a disk
DISK = Path("/var/tmp")
#: what the run of all tests takes at its widest, with room to spare
ENOUGH_BYTES = 2 * 2**30
#: locked folders: as long as this process lives, no other run removes them
_LOCKED: list[int] = []


def has_room_in_memory() -> bool:
    """Whether there is a file system in memory that holds what the tests write."""
    return MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ENOUGH_BYTES


def make_run_folder(parent: Path) -> Path:
    """Return a new folder below `parent`, and remove those of runs that have ended, however they did."""
    home = parent / f"mid-tests-{os.getuid()}"  # short: the name of a socket has 107 bytes
    home.mkdir(mode=0o700, exist_ok=True)
    with _locked(home):
        for folder in home.iterdir():
            _remove_unless_used(folder)
        folder = Path(tempfile.mkdtemp(prefix="", dir=home))
        _LOCKED.append(_lock(folder))
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _lock(folder: Path) -> int:
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return handle


def _remove_unless_used(folder: Path) -> None:
    try:
        handle = _lock(folder)
    except BlockingIOError:
        return
    shutil.rmtree(folder, ignore_errors=True)
    os.close(handle)
