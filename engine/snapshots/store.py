"""Stores: where the files of a run live. Needs no torch.

Two promises matter: a written file is whole and durable or not there, and `create` has one winner. Local
folders keep both with rename, link and fsync (`local.py`), S3 with its conditional put (`remote.py`).
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from uuid import uuid4

from midstride.engine.errors import SnapshotError, StoreUnsafe

__all__ = ["Store"]


class Store(ABC):
    """A folder of files; paths are relative to it and separated by "/".

    Args:
        url: where it is, absolute, without a slash at the end.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @staticmethod
    def open(url: str | os.PathLike[str]) -> "Store":
        """Return the store at `url`: a path, file://, s3://, or any other fsspec URL.

        Raises:
            StoreUnsafe: nothing installed here can reach such a URL.
        """
        from midstride.engine.snapshots.local import LocalStore
        from midstride.engine.snapshots.remote import RemoteStore

        text = os.fspath(url)
        scheme, mark, rest = text.partition("://")
        if not mark:
            return LocalStore(text)
        return LocalStore(rest) if scheme in ("file", "local") else RemoteStore(text)

    def at(self, path: str) -> "Store":
        """Return the store of the folder `path` inside this one."""
        return type(self)(f"{self.url}/{path}")

    @abstractmethod
    def write(self, path: str, data: bytes | memoryview) -> None:
        """Put a whole file, replacing what was there; when this returns it survives a power cut."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> bool:
        """Put a whole file unless one is there; False if it was. Of many callers exactly one gets True.

        Raises:
            StoreUnsafe: the store cannot promise that.
        """

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return a whole file; FileNotFoundError if there is none."""

    @abstractmethod
    def stream(self, path: str) -> Iterator[bytes]:
        """Return a file in chunks; FileNotFoundError if there is none."""

    @abstractmethod
    def list(self, path: str = "") -> list[str]:
        """Return the names directly below the folder `path`, sorted; none if it is not there."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Return the bytes of a file; FileNotFoundError if there is none."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file or a folder with all that is in it; no error if it is gone already."""

    def exists(self, path: str) -> bool:
        """Whether there is a file at `path`."""
        try:
            self.size(path)
        except FileNotFoundError:
            return False
        return True

    def ensure_writable(self) -> None:
        """Prove that files can be put here, and created exclusively.

        Raises:
            StoreUnsafe: they cannot; the message says why and what to do.
            SnapshotError: the store does not answer; a retry may help.
        """
        probe = f".probe-{uuid4().hex}"
        try:
            first, second = self.create(probe, b"probe"), self.create(probe, b"probe")
            self.remove(probe)
        except (ConnectionError, TimeoutError) as error:
            raise SnapshotError(f"{self.url} does not answer: {error}") from error
        except OSError as error:
            raise StoreUnsafe(
                f"{self.url} cannot be written: {error}. Allow it, or choose another place with snapshots.url."
            ) from error
        if (first, second) != (True, False):
            raise StoreUnsafe(
                f"{self.url} let the same file be created twice, so two worlds could advance one run. "
                "Choose a local folder or S3 with snapshots.url."
            )
