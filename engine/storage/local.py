"""Local folders as a store: rename and link are atomic, and fsync makes them durable."""

import _thread
import contextlib
import errno
import fcntl
import io
import mmap
import os
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Protocol, TypeVar
from uuid import uuid4

import numpy as np

from midstride.engine.errors import SnapshotDamaged, StoreUnsafe
from midstride.engine.storage.store import EXCLUSIVE_HINT, PROBE, Store, StoreOptions

__all__ = ["LocalStore"]

T = TypeVar("T")

_CHUNK_BYTES = 8 * 2**20
_WRITE_BYTES = 32 * 2**20  # between two writes the thread can wait for Python's lock
_PAGE_BYTES = 4096  # no disk has larger blocks
_DIRECT_BYTES = 2**20
_PROBE_S = 3600.0  # no test of write access takes as long
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class LocalStore(Store):
    """A folder on a file system that this machine mounts."""

    def __init__(self, url: str, options: StoreOptions | None = None) -> None:
        super().__init__(os.path.abspath(url), options)  # noqa: PTH100 (a link stays a link)
        self._folder = Path(self.url)

    def write(  # noqa: D102
        self, path: str, data: bytes | memoryview, *, check: Callable[[], None] | None = None
    ) -> None:
        target = self._unlinked(path)
        draft = _draft(target, data)
        try:
            if check:
                check()
            _give_name(draft, target)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        _sync_folder(target.parent)

    def write_all(  # noqa: D102
        self, folder: str, files: Iterable[tuple[str, bytes | memoryview]]
    ) -> None:
        drafts: list[tuple[Path, Path]] = []
        syncs = _Syncs()
        try:
            for name, data in files:
                target = self._unlinked(f"{folder}/{name}")
                drafts.append((_draft(target, data, syncs.begin), target))
            syncs.finish()
            for draft, target in drafts:
                _give_name(draft, target)
        except BaseException:
            syncs.wait()
            for draft, _ in drafts:
                draft.unlink(missing_ok=True)
            raise
        _sync_folder(self._at(folder))  # once for all names

    def create(self, path: str, data: bytes) -> bool:  # noqa: D102
        target = self._unlinked(path)
        draft = _draft(target, data)
        try:
            target.hardlink_to(draft)  # unlike rename, fails if the target is there; unlike O_EXCL, brings its content
        except FileExistsError:
            return False
        except FileNotFoundError:
            if target.exists():  # a winner, and it has removed our draft since
                return False
            raise
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if self.options.lease != "none":
                raise StoreUnsafe(
                    f"{self.url} is on a file system without hard links, so files cannot be created exclusively "
                    f"there. {EXCLUSIVE_HINT}"
                ) from error
            if target.exists():
                return False
            draft.rename(target)
        finally:
            draft.unlink(missing_ok=True)
        _sync_folder(target.parent)
        return True

    def read(self, path: str) -> bytes:  # noqa: D102
        with self._opened(path) as file:
            return file.readall()

    def stream(  # noqa: D102
        self, path: str, ranges: Sequence[tuple[int, int]] | None = None
    ) -> Iterator[bytes | memoryview]:
        # One buffer for all chunks, beside the heap: otherwise freed chunks would leave holes of their size.
        with self._opened(path) as file:
            buffer = memoryview(mmap.mmap(-1, _CHUNK_BYTES))
            for start, end in [(0, sys.maxsize)] if ranges is None else ranges:
                file.seek(start)
                while count := file.readinto(buffer[: end - start]):
                    start += count
                    yield buffer[:count]

    def _at(self, path: str) -> Path:
        """Return the path of a file. Refuse one outside of the store, as in a damaged document."""
        if path.startswith("/") or ".." in path.split("/"):
            raise SnapshotDamaged(f"{path!r} leads out of {self.url}")
        return self._folder / path

    def _unlinked(self, path: str) -> Path:
        """Return the path of a file.

        Folders on the way are no links, except those directly in this one.
        """
        target = self._at(path)
        if any((self._folder / folder).is_symlink() for folder in [*PurePath(path).parents][:-2]):
            raise OSError(errno.ELOOP, "its folder is a link, which is not followed", str(target))
        return target

    def _opened(self, path: str) -> io.FileIO:
        """Open a regular file for reading. Links (which lead elsewhere) and FIFOs are refused.

        The folders directly in this one can be links, for example to snapshots on another disk.
        """
        target = self._unlinked(path)
        file = io.open(target, "rb", buffering=0, opener=_unfollowed)  # noqa: SIM115, UP020 - as pathlib has it
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(target))

    def list(self, path: str = "") -> list[str]:  # noqa: D102
        folder = self._at(path)
        try:
            names = os.listdir(folder)  # noqa: PTH208 (names are wanted)
        except NotADirectoryError:
            return []
        except FileNotFoundError:
            _ensure_no_link(folder)
            return []
        return sorted(name for name in names if not name.startswith("."))  # drafts are hidden

    def find(self, path: str = "") -> dict[str, int]:  # noqa: D102
        found, top = {}, self._at(path)

        def cannot_be_listed(error: OSError) -> None:
            if Path(error.filename) != top:
                found[Path(error.filename).relative_to(top).as_posix()] = 0  # who reads it learns why
            elif isinstance(error, FileNotFoundError):
                _ensure_no_link(top)
            elif not isinstance(error, NotADirectoryError):
                raise error

        for folder, below, names in os.walk(top, onerror=cannot_be_listed):
            for file in (Path(folder, name) for name in names):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    found[file.relative_to(top).as_posix()] = _size(file)
            if not names and not below and Path(folder) != top:
                found[Path(folder).relative_to(top).as_posix()] = 0  # a folder, perhaps in the place of a file
        return found

    def remove_old_probes(self, probe: str) -> None:  # noqa: D102
        written = self._at(probe).stat().st_mtime  # by the clock of the file system, as the others are
        for pattern in (f"{PROBE}*", f".{PROBE}*.draft"):
            for old in self._folder.glob(pattern):
                with contextlib.suppress(FileNotFoundError):
                    if old.stat().st_mtime < written - _PROBE_S:
                        old.unlink()

    def ensure_no_file(self, folder: str) -> None:  # noqa: D102
        if (target := self._at(folder)).is_file():
            raise StoreUnsafe(
                f"{target} is a file where a folder is needed: move it away, and restore the folder if you have a "
                "copy. Nothing was changed."
            )

    def ensure_no_folder(self, file: str) -> None:  # noqa: D102
        target = self._at(file)
        if target.is_dir() and not target.is_symlink() and any(target.iterdir()):
            raise StoreUnsafe(f"{target} is a folder where a file is needed: move it away. Nothing was changed.")

    def size(self, path: str) -> int:  # noqa: D102
        target = self._at(path)
        if target.is_dir():
            raise FileNotFoundError(errno.ENOENT, "a folder, not a file", str(target))
        return target.stat().st_size

    def remove_drafts(self, *folders: str, upto: str | None = None) -> None:  # noqa: D102
        for folder in folders:
            # Keep the probe by which a starting world tests its access.
            for draft in (self._folder / folder).glob(".[!.]*.draft"):
                if upto is not None and draft.name[1:].rsplit(".", 2)[0] > upto:
                    continue
                if draft.is_dir() and not draft.is_symlink():  # damage, and no world can start before it goes
                    shutil.rmtree(draft)
                else:
                    draft.unlink(missing_ok=True)

    def remove(self, path: str) -> None:  # noqa: D102
        target = self._unlinked(path)
        try:
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink()
        except FileNotFoundError:
            return
        _sync_folder(target.parent)


def _unfollowed(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        raise
    except OSError:
        return file.lstat().st_size  # a loop of links: who reads it learns why


class _Begin(Protocol):
    """Calls a function that makes something durable, now or in a thread."""

    def __call__(self, sync: Callable[[T], None], what: T, /) -> None: ...


def _now(sync: Callable[[T], None], what: T) -> None:
    sync(what)


class _Syncs:
    """Makes files and folders durable at the same time: a disk syncs several as fast as one.

    A process ends without waiting for these threads. It would wait for those of a pool, and so for a disk that hangs.
    `threading.Thread.start` waits until the new thread runs, which takes long while another thread trains.
    """

    def __init__(self) -> None:
        self._ends: list[threading.Event] = []
        self._errors: list[BaseException] = []

    def begin(self, sync: Callable[[T], None], what: T) -> None:
        """Call `sync` in a thread, or here if none can be started."""
        end = threading.Event()

        def act() -> None:
            try:
                sync(what)
            except BaseException as error:
                self._errors.append(error)
            finally:
                end.set()

        try:
            _thread.start_new_thread(act, ())
        except RuntimeError:  # too many threads
            act()
        self._ends.append(end)

    def wait(self) -> None:
        """Wait until all calls have ended; it can be called again if a signal ends it early."""
        for end in self._ends:
            end.wait()

    def finish(self) -> None:
        """Wait for all calls; raise the first error."""
        self.wait()
        if self._errors:
            raise self._errors[0]


def _draft(target: Path, data: bytes | memoryview, begin: _Begin = _now) -> Path:
    """Write `data` to a hidden file beside `target`; `begin` makes it and new folders durable."""
    _make_folder(target.parent, begin)
    draft = target.parent / f".{target.name}.{uuid4().hex}.draft"
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _write_all(handle, memoryview(data).cast("B"))
        except BaseException:
            os.close(handle)
            raise
        begin(_sync_file, handle)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return draft


def _sync_file(handle: int) -> None:
    """Make a written file survive a power cut, and close it."""
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _give_name(draft: Path, target: Path) -> None:
    """Rename `draft` to `target`, replacing an existing file."""
    if target.is_dir() and not target.is_symlink():
        target.rmdir()  # in the way, and refused if anything is in it
    draft.replace(target)


def _write_all(handle: int, data: memoryview) -> None:
    """Write `data`. Long page-aligned data bypass the page cache, two to five times as fast."""
    direct = len(data) >= _DIRECT_BYTES and _address(data) % _PAGE_BYTES == 0 and _bypass_cache(handle, True)
    while data:
        if direct and len(data) < _PAGE_BYTES:
            direct = _bypass_cache(handle, False)  # the end of a file is rarely that of a page
        size = min(len(data), _WRITE_BYTES)
        try:
            written = os.write(handle, data[: size // _PAGE_BYTES * _PAGE_BYTES if direct else size])
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            direct, written = _bypass_cache(handle, False), 0  # a file system that wants other alignments
        data = data[written:]


def _bypass_cache(handle: int, wanted: bool) -> bool:
    """Switch O_DIRECT; return whether it is on now."""
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | _O_DIRECT if wanted else flags & ~_O_DIRECT)
    except OSError:
        return False  # the file system has none
    return wanted


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


def _ensure_no_link(missing: Path) -> None:
    """Raise if a missing folder is a link to an unmounted disk, where the run would start over."""
    if missing.is_symlink():
        raise OSError(errno.ENOLINK, "a link that leads nowhere", str(missing))


def _make_folder(folder: Path, begin: _Begin) -> None:
    """Make `folder` and its parents; `begin` makes each entry durable."""
    if folder.is_dir():
        return
    _make_folder(folder.parent, begin)
    _ensure_no_link(folder)
    folder.mkdir(exist_ok=True)
    begin(_sync_folder, folder.parent)


def _sync_folder(folder: Path) -> None:
    """Make the entries of `folder` survive a power cut."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return  # removed meanwhile by a newer world's pruning
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
