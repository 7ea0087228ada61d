"""The parent of a fork, whose files a fork reads up to one snapshot. Needs no torch.

    <url>/<fork>/parent.json   the parent, and the snapshot that the fork starts from

Nothing is copied, and nothing is written to the parent's folder: a fork writes into its own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from midstride.engine.errors import SnapshotDamaged, SnapshotError
from midstride.engine.formatting import url_name
from midstride.engine.snapshots.position import Position, lease_name, parse_name
from midstride.engine.storage.checksums import Kind, decode_document, encode_document
from midstride.engine.storage.store import Store, StoreOptions

__all__ = [
    "NO_CHANGES",
    "PARENT",
    "Changes",
    "ForkedStore",
    "Parent",
    "inherited_run_id",
    "inherits",
    "open_run",
    "parent_of",
    "read_parent",
    "with_parent",
]

PARENT = "parent.json"
_FOLDERS, _LEASE = ("snapshots", "best", "last"), "lease"
_KINDS: dict[str, Kind] = {"url": str, "run_id": str, "lineage": list, "changes": dict}
_CHANGES: dict[str, Kind] = {"settings": list, "values": dict, "accepted": list}
_DEEPEST = 100  #: forks of forks


@dataclass(frozen=True)
class Changes:
    """The changes of the job that were made with a fork.

    Args:
        settings: as they were given, such as "trainer.max_epochs=20".
        values: key of the job -> its value before and after, as JSON values; with those of a parent that is a fork.
        accepted: parts of the run's identity that they change.
    """

    settings: tuple[str, ...] = ()
    values: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    accepted: tuple[str, ...] = ()


NO_CHANGES = Changes()


@dataclass(frozen=True)
class Parent:
    """The parent of a fork, as `parent.json` names it.

    Args:
        url: folder or URL of the parent; "../name" for a run beside the fork.
        run_id: tells the parent from another run in its place.
        lineage: the snapshot that the fork starts from, the one from which its attempt resumed, and so on.
        changes: of the job.
    """

    url: str
    run_id: str
    lineage: tuple[str, ...]
    changes: Changes = NO_CHANGES

    @property
    def run(self) -> str:
        """Name of the parent."""
        return url_name(self.url)

    @property
    def snapshot(self) -> str:
        """Name of the snapshot that the fork starts from."""
        return self.lineage[0]

    @property
    def step(self) -> int:
        """Optimizer steps of that snapshot."""
        return self.ends[max(self.ends)].step

    @property
    def ends(self) -> dict[int, Position]:
        """Generation of the parent -> last position of it that belongs to the fork."""
        return {parsed[1]: parsed[0] for name in self.lineage if (parsed := parse_name(name))}

    def __str__(self) -> str:
        return f"{self.run}, step {self.step}"

    def encode(self) -> bytes:
        """Return the content of `parent.json`."""
        return encode_document(asdict(self))

    def lease(self, generation: int) -> bytes:
        """Return the lease of a generation of the parent, as far as the fork needs it."""
        at = next(at for at, name in enumerate(self.lineage) if (one := parse_name(name)) and one[1] == generation)
        rest = self.lineage[at + 1 :]
        document = {"generation": generation, "resumed_from": rest[0] if rest else None, "ancestors": rest}
        return encode_document({**document, "run_id": self.run_id, "facts": {}, "time": 0.0})

    def url_from(self, fork: str) -> str:
        """Return the absolute URL of the parent of the fork at the URL `fork`."""
        return f"{fork.rpartition('/')[0]}/{self.url[3:]}" if self.url.startswith("../") else self.url


def read_parent(store: Store) -> Parent | None:
    """Return the parent of the run in `store`; None if the run is no fork.

    Raises:
        SnapshotDamaged: `parent.json` has unexpected content.
    """
    with store.errors_explained("read"):
        try:
            data = store.read(PARENT)
        except (FileNotFoundError, NotADirectoryError):
            return None
    found = decode_document(data, f"{store.url}/{PARENT}", **_KINDS)
    lineage, changes = found["lineage"], found["changes"]
    if not lineage or not all(isinstance(name, str) and parse_name(name) for name in lineage):
        raise SnapshotDamaged(f"{store.url}/{PARENT} names no snapshots: {lineage!r:.80}. Fork again")
    if [name for name, kind in _CHANGES.items() if not isinstance(changes.get(name), kind)]:
        raise SnapshotDamaged(f"{store.url}/{PARENT} names no changes: {changes!r:.80}. Fork again")
    made = Changes(tuple(map(str, changes["settings"])), changes["values"], tuple(map(str, changes["accepted"])))
    return Parent(found["url"], found["run_id"], tuple(lineage), made)


class ForkedStore(Store):
    """The folder of a fork: its own files, and inherited ones, which are never written.

    Args:
        own: the fork's own folder.
        origin: the parent's folder, of which nothing but the inherited files is read.
        parent: decides which files are inherited.
        prefix: path of this folder in that of the run, with a slash at the end.
    """

    def __init__(self, own: Store, origin: Store, parent: Parent, prefix: str = "") -> None:
        super().__init__(own.url, own.options)
        self.own, self.origin, self.parent = own, origin, parent
        self._prefix, self._ends = prefix, parent.ends

    def inherits(self, path: str) -> bool:
        """Return whether the file or folder at `path` is the parent's, by its name."""
        folder, _, rest = f"{self._prefix}{path}".partition("/")
        name = rest.partition("/")[0]
        if folder == _LEASE:
            return name in map(lease_name, self._ends)
        parsed = parse_name(name) if folder in _FOLDERS else None
        return parsed is not None and parsed[0] <= self._ends.get(parsed[1], Position(-1))

    def _holder(self, path: str) -> Store:
        """Return the store that has the file at `path`."""
        return self.origin if self.inherits(path) and not self.own.exists(path) else self.own

    def _lease(self, path: str) -> bytes | None:
        """Return the inherited lease at `path`, made without the parent's; None for any other file."""
        folder, _, name = f"{self._prefix}{path}".partition("/")
        if folder != _LEASE or not self.inherits(path) or self.own.exists(path):
            return None
        return self.parent.lease(int(name.removesuffix(".json")))

    def at(self, path: str) -> Store:  # noqa: D102
        return ForkedStore(self.own.at(path), self.origin.at(path), self.parent, f"{self._prefix}{path}/")

    def read(self, path: str) -> bytes:  # noqa: D102
        lease = self._lease(path)
        return self._holder(path).read(path) if lease is None else lease

    def stream(  # noqa: D102
        self, path: str, ranges: Sequence[tuple[int, int]] | None = None
    ) -> Iterator[bytes | memoryview]:
        return self._holder(path).stream(path, ranges)

    def size(self, path: str) -> int:  # noqa: D102
        lease = self._lease(path)
        return self._holder(path).size(path) if lease is None else len(lease)

    def list(self, path: str = "") -> list[str]:  # noqa: D102
        names, full = {*self.own.list(path)}, f"{self._prefix}{path}".rstrip("/")
        if full == _LEASE:
            names |= {*map(lease_name, self._ends)}  # those of other attempts have nothing to do with the fork
        elif full in _FOLDERS:
            names |= {name for name in self.origin.list(path) if self.inherits(f"{path}/{name}".lstrip("/"))}
        elif self.inherits(path):
            names |= {*self.origin.list(path)}
        return sorted(names)

    def find(self, path: str = "") -> dict[str, int]:  # noqa: D102
        found, full = self.own.find(path), f"{self._prefix}{path}".rstrip("/")
        if full not in _FOLDERS and not self.inherits(path):
            return found
        theirs = self.origin.find(path).items()
        return {**{file: size for file, size in theirs if self.inherits(f"{path}/{file}".lstrip("/"))}, **found}

    def write(  # noqa: D102
        self, path: str, data: bytes | memoryview, *, check: Callable[[], None] | None = None
    ) -> None:
        self.own.write(path, data, check=check)

    def write_all(self, folder: str, files: Iterable[tuple[str, bytes | memoryview]]) -> None:  # noqa: D102
        self.own.write_all(folder, files)

    def create(self, path: str, data: bytes) -> bool:  # noqa: D102
        return self.own.create(path, data)

    def remove(self, path: str) -> None:  # noqa: D102
        self.own.remove(path)

    def remove_known(self, path: str, *files: Sequence[str]) -> None:  # noqa: D102
        self.own.remove_known(path, *files)

    def remove_drafts(self, *folders: str, upto: str | None = None) -> None:  # noqa: D102
        self.own.remove_drafts(*folders, upto=upto)

    def unfinished(self, path: str) -> Sequence[str]:  # noqa: D102
        return self.own.unfinished(path)

    def ensure_writable(self, folders: Iterable[str] = (), files: Iterable[str] = ()) -> None:  # noqa: D102
        self.own.ensure_writable(folders, files)

    def is_transient(self, error: BaseException) -> bool:  # noqa: D102
        return self.own.is_transient(error)

    def advice(self, error: BaseException, done: str = "written") -> SnapshotError | None:  # noqa: D102
        return self.own.advice(error, done)


def open_run(url: str, options: StoreOptions | None = None) -> Store:
    """Return the store of the run at `url`, with the inherited files if the run is a fork.

    Raises:
        SnapshotDamaged: `parent.json` has unexpected content.
    """
    return with_parent(Store.open(url, options))


def with_parent(store: Store, depth: int = 0) -> Store:
    """Return the run in `store`, with the inherited files if it is a fork; raises as `open_run`."""
    if isinstance(store, ForkedStore) or (parent := read_parent(store)) is None:
        return store
    if depth > _DEEPEST:
        raise SnapshotDamaged(f"{store.url}/{PARENT}: its chain of parents is a circle. Fork again")
    origin = Store.open(parent.url_from(store.url), replace(store.options, lease="none"))  # it is read only
    return ForkedStore(store, with_parent(origin, depth + 1), parent)


def parent_of(store: Store) -> Parent | None:
    """Return the parent of the run in `store`, as `open_run` returns it; None if it is no fork."""
    return store.parent if isinstance(store, ForkedStore) else None


def inherits(store: Store, path: str) -> bool:
    """Return whether the file or folder at `path` of a run belongs to the parent of this fork."""
    return isinstance(store, ForkedStore) and store.inherits(path)


def inherited_run_id(store: Store, path: str) -> str | None:
    """Return the id of the run that an inherited file is of; None if this run has written it."""
    found: str | None = None
    while isinstance(store, ForkedStore) and store.inherits(path):
        found, store = store.parent.run_id, store.origin
    return found
