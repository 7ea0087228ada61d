"""Any fsspec URL as a store; exclusive creation only where it is known to be exclusive."""

from collections.abc import Iterator
from typing import Any

from midstride.engine.errors import StoreUnsafe
from midstride.engine.snapshots.store import Store

__all__ = ["RemoteStore"]

_CHUNK_BYTES = 8 * 2**20
#: whose conditional put was tried; the generic mode="create" of fsspec looks first and writes then
_EXCLUSIVE = ("s3", "s3a")
#: what a server answers to the losers of a conditional put
_LOST = ("PreconditionFailed", "ConditionalRequestConflict")


class RemoteStore(Store):
    """A prefix in an object store. Credentials and endpoint come from the environment or fsspec's configuration."""

    def __init__(self, url: str) -> None:
        import fsspec

        super().__init__(url.rstrip("/"))
        self._scheme = url.partition("://")[0]
        try:
            fsspec.get_filesystem_class(self._scheme)
        except (ImportError, ValueError) as error:
            raise StoreUnsafe(f"{url} cannot be reached from here: {error}") from error

    @property
    def _files(self) -> Any:
        # Asked for each time: fsspec keeps one instance per process and thread, so a fork gets its own.
        import fsspec

        return fsspec.filesystem(self._scheme, use_listings_cache=False)

    def _full(self, path: str) -> str:
        return f"{self.url}/{path}" if path else self.url

    def write(self, path: str, data: bytes | memoryview) -> None:  # noqa: D102
        self._files.pipe_file(self._full(path), bytes(data))

    def create(self, path: str, data: bytes) -> bool:  # noqa: D102
        if self._scheme not in _EXCLUSIVE:
            raise StoreUnsafe(
                f"{self._scheme}:// cannot promise that of many worlds only one creates a file, "
                "so two could advance one run. "
                "Choose a local folder or s3:// with snapshots.url."
            )
        try:
            self._files.pipe_file(self._full(path), data, mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            if not any(word in f"{error} {error.__cause__}" for word in _LOST):
                raise
            return False
        return True

    def read(self, path: str) -> bytes:  # noqa: D102
        return bytes(self._files.cat_file(self._full(path)))

    def stream(self, path: str) -> Iterator[bytes]:  # noqa: D102
        with self._files.open(self._full(path), "rb", block_size=_CHUNK_BYTES) as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk

    def list(self, path: str = "") -> list[str]:  # noqa: D102
        full = self._full(path)
        try:
            found = self._files.ls(full, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        # Some stores list the folder itself as an empty object, and in an order of their own.
        own = self._files._strip_protocol(full).strip("/")
        names = {entry.strip("/").rsplit("/", 1)[-1] for entry in found if entry.strip("/") != own}
        return sorted(name for name in names if not name.startswith("."))

    def size(self, path: str) -> int:  # noqa: D102
        info = self._files.info(self._full(path))
        if info["type"] != "file":
            raise FileNotFoundError(f"{self._full(path)} is a folder, not a file")
        return int(info["size"])

    def remove(self, path: str) -> None:  # noqa: D102
        try:
            self._files.rm(self._full(path), recursive=True)
        except FileNotFoundError:
            return
