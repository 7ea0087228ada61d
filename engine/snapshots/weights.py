"""Best and last weights of a run: which of them count, and their facts. Needs no torch.

    best/000000001200-g000003/   position and generation, as in a snapshot's name
        model.safetensors        the tensors by name: any tool can open them
        model.json               ties and memory layouts
        manifest.json            written last: metrics, facts and checksums

Under strategies that shard them, each rank writes its rows: model-00001-of-00004.safetensors and so on.

Weights are snapshots of the module alone: one committer writes them, one catalog finds them, the lineage decides which
of them count. `reader.py` reads them.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

from midstride.engine.errors import SnapshotDamaged, SnapshotError
from midstride.engine.snapshots.catalog import SNAPSHOTS, WEIGHTS, Catalog, Snapshot
from midstride.engine.snapshots.lineage import Lineage
from midstride.engine.snapshots.position import parse_name
from midstride.engine.state.bounds import damaged_on_error, sizes
from midstride.engine.state.tensor_header import tensor_header
from midstride.engine.storage.checksums import check_digest, digest_of
from midstride.engine.storage.store import Store
from midstride.engine.storage.verification import read_verified

__all__ = [
    "best_of",
    "best_to_show",
    "download_tensors",
    "error_with_remedy",
    "facts_of",
    "folder_to_test",
    "is_of_the_end",
    "last_is_missing",
    "missing_weights",
    "newest_weights",
]

log = logging.getLogger(__name__)


@contextmanager
def error_with_remedy() -> Iterator[None]:
    """Add the remedy to errors about damaged weights in the block."""
    try:
        yield
    except SnapshotDamaged as error:
        if "snapshots repair" in str(error):
            raise
        raise SnapshotDamaged(
            f"{error}. `midstride snapshots repair` rebuilds them or sets them aside: older ones count then"
        ) from error


@error_with_remedy()
def newest_weights(store: Store, folder: str) -> Snapshot | None:
    """Return the weights in `folder` ("best" or "last") that count; None if none were saved.

    Raises:
        SnapshotDamaged: their manifest, or a lease of the run, has unexpected content.
    """
    return Catalog(store, folder).newest()


def download_tensors(store: Store, weights: Snapshot, path: Path) -> Path:
    """Write the tensors of `weights`, whole, into the local file `path`; return `path`.

    Raises:
        SnapshotDamaged: they are missing or differ from the manifest.
    """
    names = [name for name in weights.manifest["files"] if name.endswith(".safetensors")]
    with path.open("wb") as file:
        if len(names) == 1:
            _copy(store, weights, names[0], lambda at, chunk: file.write(chunk))
        else:
            _merge(store, weights, names, file)
    return path


def _copy(store: Store, weights: Snapshot, name: str, write: Callable[[int, memoryview], object]) -> None:
    """Call `write` with each chunk of a file and its place; verify the file."""

    def copied() -> Iterator[memoryview]:
        at = 0
        for chunk in store.stream(f"{weights.path}/{name}"):
            write(at, memoryview(chunk))
            yield memoryview(chunk)
            at += len(chunk)

    where = f"{store.url}/{weights.path}/{name}"
    try:
        found = digest_of(copied())
    except FileNotFoundError as error:
        raise SnapshotDamaged(f"{where} is missing") from error
    check_digest(where, weights.manifest["files"][name], found)


@dataclass(frozen=True)
class _Part:
    """The file of one rank.

    Args:
        name: of the file.
        begin: where its tensors start.
        spans: first byte of each tensor, counted from there, and the byte behind its last.
        entries: entries of the tensors in its header.
        rows: nodes of the row shards among them.
    """

    name: str
    begin: int
    spans: dict[str, tuple[int, ...]]
    entries: dict[str, dict[str, Any]]
    rows: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, store: Store, weights: Snapshot, name: str) -> "_Part":
        """Read the header of the file `name`, and the document beside it."""
        path, document = f"{weights.path}/{name}", f"{name.removesuffix('.safetensors')}.json"
        files = weights.manifest["files"]
        size = int.from_bytes(b"".join(store.stream(path, [(0, 8)])), "little")
        size = min(size, files[name]["bytes"])
        entries = json.loads(b"".join(store.stream(path, [(8, 8 + size)])))
        tree = json.loads(read_verified(store, f"{weights.path}/{document}", files[document]))["tree"]
        rows = {node["rows"]["name"]: node for node in tree.values() if type(node) is dict and node.get("$") == "piece"}
        if moved := [name for name, node in rows.items() if {"offset", "strides"} & node["rows"].keys()]:
            raise SnapshotError(f"{store.url}/{path} holds the rows of {moved[0]} in another order: load the weights")
        return cls(name, 8 + size, {key: sizes(one["data_offsets"]) for key, one in entries.items()}, entries, rows)

    def nbytes(self, name: str) -> int:
        """Return the bytes of a tensor in this file."""
        start, end = self.spans[name]
        return end - start


def _merge(store: Store, weights: Snapshot, names: Sequence[str], file: IO[bytes]) -> None:
    """Write the tensors of all ranks into one file, a chunk at a time."""
    with damaged_on_error(f"{store.url}/{weights.path}"):
        try:
            parts = [_Part.read(store, weights, name) for name in sorted(names)]
        except FileNotFoundError as error:
            raise SnapshotDamaged(f"a file of {store.url}/{weights.path} is missing: {error}") from error
        whole = {name: _whole(parts, name) for name in parts[0].entries}
        head = tensor_header(whole)
        ends = accumulate((nbytes for *_, nbytes in whole.values()), initial=len(head))
        starts = dict(zip(whole, ends, strict=False))
        places = [_places(part, whole, starts) for part in parts]
    file.write(head)
    for part, own in zip(parts, places, strict=True):
        _copy(store, weights, part.name, partial(_place, file, own))


def _whole(parts: Sequence[_Part], name: str) -> tuple[str, Sequence[int], int]:
    """Return dtype, shape and bytes of a whole tensor."""
    entry, node = parts[0].entries[name], parts[0].rows.get(name)
    if node is None:
        return entry["dtype"], sizes(entry["shape"]), parts[0].nbytes(name)
    nbytes = sum(part.nbytes(name) for part in parts if name in part.spans)
    is_flat = entry["shape"] != node["rows"]["shape"]  # of a dtype that these files have not
    return entry["dtype"], [nbytes] if is_flat else sizes(node["shape"]), nbytes


def _places(
    part: _Part, whole: Mapping[str, tuple[str, Sequence[int], int]], starts: Mapping[str, int]
) -> list[tuple[int, int, int]]:
    """Return start and end of each tensor in its file, and its start in the merged one."""
    found = []
    for name, (start, end) in part.spans.items():
        if start == end:
            continue
        node = part.rows.get(name)
        above = node["start"] * whole[name][2] // max(node["shape"][0], 1) if node else 0
        found.append((part.begin + start, part.begin + end, starts[name] + above))
    return found


def _place(file: IO[bytes], places: Sequence[tuple[int, int, int]], at: int, chunk: memoryview) -> None:
    """Write the tensors in a chunk, which is at `at` in its own file, to their `places`."""
    for start, end, target in places:
        first, last = max(start, at), min(end, at + len(chunk))
        if first < last:
            file.seek(target + first - start)
            file.write(chunk[first - at : last - at])


def folder_to_test(store: Store) -> str:
    """Return "best", or "last" without best weights of the last fit's monitor.

    Raises:
        SnapshotDamaged: a manifest, or a lease of the run, has unexpected content.
    """
    best, others = _best_and_other_monitors(store)
    if best is not None and not others:
        return "best"
    if best is not None:
        log.warning("%s/%s was %s: its last weights are taken", store.url, best.path, others)
    return "last"


def best_to_show(store: Store) -> Snapshot | None:
    """Return the best weights, if any and of the last fit's monitor.

    Raises:
        SnapshotDamaged: a manifest, or a lease of the run, has unexpected content.
    """
    best, others = _best_and_other_monitors(store)
    return None if others else best


def _best_and_other_monitors(store: Store) -> tuple[Snapshot | None, str]:
    """Return the best weights, and a text if other monitors than the last fit's chose them."""
    best, last = (newest_weights(store, folder) for folder in WEIGHTS)
    then, now = (saved.manifest["facts"].get("monitors") if saved else None for saved in (best, last))
    if then is None or now is None or all(one in now for one in then):
        return best, ""
    return best, f"called best by {_monitors(then)}, and the run ended with {_monitors(now)}"


def _monitors(watched: Sequence[Mapping[str, str]]) -> str:
    return " and ".join(f"{one['monitor']} ({one['mode']})" for one in watched) or "no monitor"


def best_of(store: Store, monitor: str, mode: str) -> dict[str, Any]:
    """Return the facts of the best weights; {} if another value or mode made them the best."""
    facts = facts_of(store, "best")
    watched = facts.get("monitors")  # empty if a callback of the user's called them best
    return {} if watched and {"monitor": monitor, "mode": mode} not in watched else facts


def facts_of(store: Store, folder: str) -> dict[str, Any]:
    """Return the facts of the weights in `folder`, with metrics; {} if none can be read."""
    try:
        saved = newest_weights(store, folder)
    except SnapshotDamaged:
        return {}
    return saved.manifest["facts"] if saved else {}


def missing_weights(store: Store, snapshot: Snapshot) -> dict[str, str]:
    """Return messages by folder on missing weights that the manifest of `snapshot` names."""
    lineage = Lineage.of(store)
    return {
        folder: f"weights {store.url}/{folder}/{name} are missing"
        for folder, name in snapshot.manifest["facts"].get("weights", {}).items()
        if lineage.holds(name) and not Catalog(store, folder).has(name)
    }


def last_is_missing(store: Store, newest: Snapshot) -> str:
    """Return a message if `newest` ends the run and `last` has no weights of the end."""
    if not is_of_the_end(newest):
        return ""
    parsed = parse_name(Catalog(store, "last").newest_name())
    if parsed is not None and parsed[0] >= newest.position:
        return ""
    return f"the run ended with snapshot {newest.name}, and {store.url}/last has no weights of it"


def is_of_the_end(snapshot: Snapshot) -> bool:
    """Return whether `snapshot` was taken at the regular end of the fit."""
    return snapshot.folder == SNAPSHOTS and bool(snapshot.manifest["facts"].get("progress", {}).get("finished"))
