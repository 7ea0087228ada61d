"""Stores: where the files of a run live. Needs no torch.

Two promises matter: a written file is whole and durable or not there, and `create` has one winner. Local
folders keep both with rename, link and fsync (`local.py`), S3 with its conditional put (`s3.py`); of any other
fsspec URL (`fsspec_store.py`) only the first is believed.
"""

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Literal
from uuid import uuid4

from midstride.engine.errors import SnapshotError, SnapshotUnreadable, StoreFull, StoreSilent, StoreUnsafe
from midstride.engine.storage.retry import is_transient
from midstride.engine.storage.urls import PASSWORD, holds_password

__all__ = ["EXCLUSIVE_HINT", "PROBE", "STORES", "Store", "StoreOptions"]

#: scheme of a URL -> where its class lives, imported when one is opened; "*" is of all others, a path is "file"
STORES: dict[str, str] = {
    "file": "midstride.engine.storage.local:LocalStore",
    "local": "midstride.engine.storage.local:LocalStore",
    "s3": "midstride.engine.storage.s3:S3Store",
    "s3a": "midstride.engine.storage.s3:S3Store",
    "*": "midstride.engine.storage.fsspec_store:RemoteStore",
}

#: group of the entry points by which an installed package brings a store: name = scheme of its URLs
ENTRY_POINTS = "midstride.stores"

#: the ways out, as text
EXCLUSIVE_HINT = (
    "Choose a local folder or s3:// with snapshots.url; or set snapshots.lease: none, "
    "and ensure yourself that only one attempt runs at a time."
)

#: how the name of a file begins that only tries whether files can be written
PROBE = ".probe-"

_ANOTHER_PLACE = "or choose another place: snapshots.url of a job, run= of a script."
_FULL = "Free some space: the same command then resumes the run"
_READ_ONLY = (
    "It is mounted read-only, often after a disk error: see the log of the kernel (dmesg). "
    "Once it can be written again, the same command resumes the run"
)
#: error of the operating system -> ours, and the way out
_ADVICE: dict[int, tuple[type[SnapshotError], str]] = {
    errno.ENOSPC: (StoreFull, _FULL),
    errno.EDQUOT: (StoreFull, _FULL),
    errno.EROFS: (SnapshotError, _READ_ONLY),
    errno.EMFILE: (
        SnapshotError,
        "Raise the limit on open files (ulimit -n): the same command then resumes the run",
    ),
    errno.EFBIG: (
        SnapshotError,
        "Raise the limit on the size of a file (ulimit -f): the same command then resumes the run",
    ),
}

#: other errors -> the way out
_WAYS_OUT = {
    errno.ENAMETOOLONG: "Give it a shorter name",
    errno.ENOLINK: "Mount the target of the link, or correct the link",
}


def _ignore(waited_s: float, why: str) -> None:
    """Do nothing: the wait is not shown."""


@dataclass(frozen=True)
class StoreOptions:
    """Options of a store.

    Args:
        lease: "exclusive": the store must ensure that only one world advances a run; "none": the caller ensures it.
        patience_s: seconds for which each operation waits for a store that does not answer.
        on_wait: called repeatedly during such a wait, in any thread, with the seconds waited so far and the reason.
    """

    lease: Literal["exclusive", "none"] = "exclusive"
    patience_s: float = 10.0
    on_wait: Callable[[float, str], object] = _ignore


class Store(ABC):
    """A folder of files; paths are relative to it and separated by "/".

    Args:
        url: where it is, absolute, without a slash at the end.
        options: how it is used.
    """

    def __init__(self, url: str, options: StoreOptions | None = None) -> None:
        self.url = url
        self.options = options or StoreOptions()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @staticmethod
    def open(url: str | os.PathLike[str], options: StoreOptions | None = None) -> "Store":
        """Return the store at `url`: a path, file://, s3://, or a scheme of a package or fsspec.

        Raises:
            StoreUnsafe: nothing installed here can reach such a URL, it holds a password, or a package's store is none.
        """
        text = os.fspath(url)
        scheme, mark, rest = text.partition("://")
        if mark and holds_password(text):
            raise StoreUnsafe(PASSWORD)
        store = _class_of(scheme if mark else "file")
        return store(rest if scheme in ("file", "local") and mark else text, options)

    def at(self, path: str) -> "Store":
        """Return the store of the folder `path` inside this one."""
        return type(self)(f"{self.url}/{path}", self.options)

    @abstractmethod
    def write(self, path: str, data: bytes | memoryview, *, check: Callable[[], None] | None = None) -> None:
        """Write a whole file, replacing an existing one. On return it survives a power cut.

        `check` is called at every try, as late as the store can; if it raises, the old file stays.
        """

    def write_all(self, folder: str, files: Iterable[tuple[str, bytes | memoryview]]) -> None:
        """Write several whole files into a folder; when this returns, they survive a power cut.

        Each is taken from `files` only after the previous one was written. If one fails, some others can exist.

        Args:
            folder: path of the folder.
            files: name and content of each file.
        """
        for name, data in files:
            self.write(f"{folder}/{name}", data)

    @abstractmethod
    def create(self, path: str, data: bytes) -> bool:
        """Write a whole file unless it exists. Of many callers, exactly one gets True.

        Raises:
            StoreUnsafe: the store cannot ensure that, and its options require it.
        """

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return a whole file; FileNotFoundError if there is none."""

    @abstractmethod
    def stream(self, path: str, ranges: Sequence[tuple[int, int]] | None = None) -> Iterator[bytes | memoryview]:
        """Yield a file in chunks, each valid until the next. Raises FileNotFoundError.

        Args:
            path: of the file.
            ranges: first byte and end of each range to read instead, within the file; no chunk is of two of them.
        """

    @abstractmethod
    def list(self, path: str = "") -> list[str]:
        """Return the sorted names directly in the folder `path`; an empty list if it does not exist.

        An empty folder can still be listed: an object store has no folders, only names.
        """

    @abstractmethod
    def find(self, path: str = "") -> dict[str, int]:
        """Return the sizes in bytes of all files in `path` and its subfolders, by relative path."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Return the size of a file in bytes; FileNotFoundError if there is none."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file, or a folder with its content and unfinished writes. A missing one is fine."""

    def remove_known(self, path: str, *files: Sequence[str]) -> None:
        """Remove a folder whose files are known, one group of files after another."""
        for group in files[:-1]:
            for file in group:
                self.remove(f"{path}/{file}")
        self.remove(path)

    def remove_drafts(self, *folders: str, upto: str | None = None) -> None:
        """Remove unfinished writes of files directly in `folders`. A running writer then fails.

        With `upto`, only those of files whose names do not sort after it.
        """

    def unfinished(self, path: str) -> Sequence[str]:
        """Return the sorted names directly below the folder `path` that have unfinished writes.

        `list` does not return these; `remove` removes them.
        """
        return []

    def exists(self, path: str) -> bool:
        """Whether there is a file at `path`."""
        try:
            self.size(path)
        except FileNotFoundError:
            return False
        return True

    def ensure_writable(self, folders: Iterable[str] = (), files: Iterable[str] = ()) -> None:
        """Check, within seconds, that files can be written here and created exclusively.

        Args:
            folders: paths that must be folders or missing. A file in place of a folder would hide its content.
            files: paths that must not be a non-empty folder.

        Raises:
            StoreUnsafe: they cannot. The message gives reason and way out.
            StoreSilent: the store does not answer; a retry can help.
        """
        probe = f"{PROBE}{uuid4().hex}"
        with self.errors_explained("written"):
            self.list()
            for folder in folders:
                self.ensure_no_file(folder)
            for file in files:
                self.ensure_no_folder(file)
            first = self.create(probe, b"probe")
            try:
                self.remove_old_probes(probe)
                second = self.create(probe, b"probe")
            finally:
                self.remove(probe)
        if (first, second) != (True, False):
            raise StoreUnsafe(
                f"{self.url} let the same file be created twice, so two attempts could advance one run. "
                f"{EXCLUSIVE_HINT}"
            )

    def remove_old_probes(self, probe: str) -> None:
        """Remove probes of processes killed in `ensure_writable`, if much older than `probe`."""

    def ensure_no_file(self, folder: str) -> None:
        """Raise StoreUnsafe if a file at the path `folder` would hide a folder."""

    def ensure_no_folder(self, file: str) -> None:
        """Raise StoreUnsafe if a non-empty folder at the path `file` keeps it from being written."""

    @contextmanager
    def errors_explained(self, done: str) -> Iterator[None]:
        """Turn errors of the store in the block into errors that name the way out.

        Args:
            done: action of the block on the store: "read" or "written".

        Raises:
            StoreUnsafe: it refuses. The message names the way out.
            StoreSilent: it does not answer; a retry can help.
            StoreFull: there is no room; a retry helps once there is.
        """
        try:
            yield
        except OSError as error:
            if self.is_transient(error):
                raise StoreSilent(f"{self.url} does not answer: {error}") from error
            if isinstance(full := self.advice(error, done), StoreFull):
                raise full from error
            elsewhere = f", {_ANOTHER_PLACE}" if done == "written" else "."
            raise StoreUnsafe(f"{self.url} cannot be {done}: {error}. {self._way_out(error)}{elsewhere}") from error

    def advice(self, error: BaseException, done: str = "written") -> SnapshotError | None:
        """Return an error with the way out of `error`, which the store raised; None if unknown."""
        if not isinstance(error, OSError) or error.errno not in _ADVICE:
            return None
        kind, way_out = _ADVICE[error.errno]
        return kind(f"{self.url} cannot be {done}: {error}. {way_out}.")

    @contextmanager
    def reading(self, path: str) -> Iterator[None]:
        """Turn errors of reading a file or folder at `path` in the block into errors that name it.

        Raises:
            StoreUnsafe: the store refuses access. The message names the way out.
            SnapshotUnreadable: it exists and cannot be read, although the store answers.
        """
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            if self.is_transient(error):
                raise
            if isinstance(error, PermissionError):
                why = str(error.strerror or error).rstrip(".")
                raise StoreUnsafe(f"{self.url}/{path} cannot be read: {why}. {self._way_out(error)}.") from error
            raise SnapshotUnreadable(f"{self.url}/{path} cannot be read: {error.strerror or error}") from error

    def is_transient(self, error: BaseException) -> bool:
        """Whether a retry can help after `error`."""
        return is_transient(error)

    def _way_out(self, error: OSError) -> str:
        """Return the way out of `error`, raised when this store was read or written."""
        if isinstance(error, (NotADirectoryError, FileExistsError)):
            return "Name a folder"
        return _WAYS_OUT.get(error.errno or 0, "Allow it")


@cache
def _class_of(scheme: str) -> type[Store]:
    """Return the store class of this URL scheme: a row's, an installed package's, or fsspec's."""
    points = [] if scheme in STORES else [*entry_points(group=ENTRY_POINTS, name=scheme)]
    target = points[0].value if points else STORES.get(scheme, STORES["*"])
    module, _, name = target.partition(":")
    try:
        kind = getattr(import_module(module), name)
    except Exception as error:
        if not points:
            raise
        raise StoreUnsafe(f"{scheme}:// is the store {target}, which cannot be imported: {error!r}") from error
    if not (isinstance(kind, type) and issubclass(kind, Store)):
        raise StoreUnsafe(f"{scheme}:// is {target}, which is not a store: derive it from midstride.engine.Store")
    if unwritten := sorted(kind.__abstractmethods__):
        raise StoreUnsafe(f"{scheme}:// is the store {target}, which has no {', '.join(unwritten)}: write them")
    return kind
