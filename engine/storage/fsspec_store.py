"""fsspec URLs as stores. They need `lease: none`: exclusive creation is not guaranteed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from midstride.engine.errors import SnapshotDamaged, StoreUnsafe
from midstride.engine.storage.retry import RetryPolicy
from midstride.engine.storage.store import EXCLUSIVE_HINT, Store, StoreOptions

__all__ = ["RemoteStore"]

T = TypeVar("T")

_CHUNK_BYTES = 8 * 2**20
_PROBE_PATIENCE_S = 3.0


class RemoteStore(Store):
    """A folder behind fsspec.

    Credentials come from the environment or from fsspec's configuration.
    """

    def __init__(self, url: str, options: StoreOptions | None = None) -> None:
        import fsspec

        super().__init__(url.rstrip("/"), options)
        self._scheme = url.partition("://")[0]
        self._retry = RetryPolicy(self.options.patience_s, on_wait=self.options.on_wait)
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
        if ".." in path.split("/"):  # a document that was read may have named it
            raise SnapshotDamaged(f"{path!r} leads out of {self.url}")
        return f"{self.url}/{path}" if path else self.url

    def _retried(self, act: Callable[[], T]) -> T:
        """Call `act` until the store answers, and return its result."""
        return self._retry.call(act, self.url, self.is_transient)

    def write(  # noqa: D102
        self, path: str, data: bytes | memoryview, *, check: Callable[[], None] | None = None
    ) -> None:
        def put() -> None:
            if check:
                check()
            self._put(self._full(path), data)

        self._retried(put)

    def _put(self, full: str, data: bytes | memoryview) -> None:
        files = self._files
        files.makedirs(full.rpartition("/")[0], exist_ok=True)
        files.pipe_file(full, bytes(data))

    def create(self, path: str, data: bytes) -> bool:  # noqa: D102
        if self.options.lease != "none":
            raise StoreUnsafe(
                f"{self._scheme}:// cannot create a file exclusively, so two attempts could advance one run. "
                f"{EXCLUSIVE_HINT}"
            )
        if self.exists(path):
            return False
        self.write(path, data)
        return True

    def read(self, path: str) -> bytes:  # noqa: D102
        return self._retried(lambda: bytes(self._files.cat_file(self._full(path))))

    def stream(  # noqa: D102
        self, path: str, ranges: Sequence[tuple[int, int]] | None = None
    ) -> Iterator[bytes | memoryview]:
        for first, last in [(0, self.size(path))] if ranges is None else ranges:
            for start in range(first, last, _CHUNK_BYTES):
                yield self._range(path, start, min(last, start + _CHUNK_BYTES))

    def _range(self, path: str, start: int, end: int) -> bytes:
        return self._retried(lambda: bytes(self._files.cat_file(self._full(path), start=start, end=end)))

    def list(self, path: str = "") -> list[str]:  # noqa: D102
        full = self._full(path)
        try:
            found = self._retried(lambda: self._files.ls(full, detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []
        # Some stores list the folder itself as an empty object, and in an order of their own.
        own = self._files._strip_protocol(full).strip("/")
        names = {entry.strip("/").rsplit("/", 1)[-1] for entry in found if entry.strip("/") != own}
        return sorted(name for name in names if not name.startswith("."))

    def find(self, path: str = "") -> dict[str, int]:  # noqa: D102
        full = self._full(path)
        own = self._files._strip_protocol(full).rstrip("/")
        found = self._retried(lambda: self._files.find(full, detail=True))
        return {file.removeprefix(own).lstrip("/"): int(info["size"] or 0) for file, info in found.items()}

    def size(self, path: str) -> int:  # noqa: D102
        info = self._retried(lambda: self._files.info(self._full(path)))
        if info["type"] != "file":
            raise FileNotFoundError(f"{self._full(path)} is a folder, not a file")
        return int(info["size"])

    def remove(self, path: str) -> None:  # noqa: D102
        try:
            self._retried(lambda: self._files.rm(self._full(path), recursive=True))
        except FileNotFoundError:
            return

    def ensure_writable(self, folders: Iterable[str] = (), files: Iterable[str] = ()) -> None:  # noqa: D102
        if self.options.patience_s > _PROBE_PATIENCE_S:  # nothing runs yet that would be worth a longer wait
            type(self)(self.url, replace(self.options, patience_s=_PROBE_PATIENCE_S)).ensure_writable(folders, files)
        else:
            super().ensure_writable(folders, files)
