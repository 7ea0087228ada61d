"""The reader: trees of ranks out of a snapshot by ranges of bytes, and weights."""

import base64
import json
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from midstride.engine.errors import NotExact, SnapshotDamaged, SnapshotError, SnapshotMissing
from midstride.engine.snapshots.catalog import MANIFEST, SNAPSHOTS, Catalog, Snapshot, copied_weights
from midstride.engine.snapshots.parent import open_run, with_parent
from midstride.engine.snapshots.position import parse_name
from midstride.engine.snapshots.weights import error_with_remedy, newest_weights
from midstride.engine.state.bounds import damaged_on_error, sizes
from midstride.engine.state.codec import StoredTensors, decode, tensors_of
from midstride.engine.state.dtypes import torch_dtype
from midstride.engine.state.row_shards import RowShard, find_rows, rows_of_rank, whole_tensor
from midstride.engine.state.tensor_file import Run, TensorFile, blocks_in, join_runs
from midstride.engine.state.tensors import FreshTensors
from midstride.engine.storage.store import Store
from midstride.engine.storage.verification import read_verified

__all__ = [
    "SnapshotReader",
    "Weights",
    "load_weights",
    "read",
    "read_part",
    "read_weights",
    "read_whole",
    "unread",
    "weights_at",
]


#: how many files are opened at once
_AT_ONCE = 16


class SnapshotReader:
    """Reads trees of one snapshot: plan them, read the planned bytes at once, then take them.

    Args:
        store: of the run.
        snapshot: the snapshot, or weights.

    Every method raises SnapshotDamaged if a file is missing, differs from the manifest, or is not what is written.
    """

    def __init__(self, store: Store, snapshot: Snapshot) -> None:
        self._store, self._snapshot = store, snapshot
        #: URL of the snapshot
        self.where = f"{store.url}/{snapshot.path}"
        self._documents: dict[int, dict[str, Any]] = {}
        self._files: dict[str, TensorFile] = {}
        self._memory: dict[tuple[str, str], Tensor] = {}  # by file and tensor
        self._rows: dict[tuple[Any, ...], Tensor] = {}  # by the places that they are read from
        self._late: list[tuple[Tensor, int, dict[str, Any], slice]] = []  # rows that are no range of bytes
        self._planned: list[_PlannedTree] = []
        self._found: dict[int, StoredTensors] = {}  # by rank

    def has_sharded_weights(self, rank: int) -> bool:
        """Return whether the tree that `rank` gave has rows of sharded weights."""
        with damaged_on_error(f"{self.where}/{self._snapshot.stem(rank)}.json"):
            return any(place[0] == "module" for place in self._tensors_of(rank).shards)

    def plan(self, rank: int, parts: Collection[str] | None = None) -> None:
        """Plan the tree that `rank` gave, or these parts of it.

        Raises:
            SnapshotError: the snapshot was taken by fewer ranks.
        """
        size, name = self.world_size, self._snapshot.name
        if rank >= size:
            raise SnapshotError(f"snapshot {name} was taken by {size} ranks, it has no files of rank {rank}")
        with damaged_on_error(f"{self.where}/{self._snapshot.stem(rank)}.json"):
            self._plan(rank, parts, {})

    def plan_whole(self, rank: int) -> None:
        """Plan the tree that `rank` gave, with whole tensors in place of its row shards.

        Raises:
            NotExact: the ranks do not hold all rows of a tensor.
        """
        with damaged_on_error(self.where):
            places = self._places()
            whole: dict[int, RowShard | Tensor] = {}
            for place, node in places[rank].items():
                held = [found[place] for found in places if place in found]
                whole[id(node)] = self._shard(place, node, held, 0, 1).rows
            self._plan(rank, None, whole)

    def plan_merged(
        self,
        rank: int,
        size: int,
        parts: Collection[str],
        of_first: Collection[str] | None = None,
        *,
        as_tensors: bool = False,
    ) -> None:
        """Plan the trees of all ranks, with the row shards of `rank` of `size` ranks.

        Args:
            rank: in the new world.
            size: number of shards of a tensor in the new world.
            parts: keys of the trees; the others are left out.
            of_first: those of the tree of rank 0; None for all.
            as_tensors: put plain tensors in place of the row shards.

        Raises:
            NotExact: the ranks do not hold all rows of a tensor.
        """
        ranks = range(self.world_size)
        with damaged_on_error(self.where):
            places = self._places()
            cut: list[dict[int, RowShard | Tensor]] = [{} for _ in ranks]
            for place, node in places[0].items():
                if of_first is not None and place[0] not in of_first:
                    continue
                held = [found[place] for found in places if place in found]
                shard = self._shard(place, node, held, rank, size)
                for old, one in zip(ranks, held, strict=False):
                    cut[old][id(one)] = shard.rows if as_tensors else shard
            for old in ranks:
                self._plan(old, parts if old else of_first, cut[old])

    def _places(self) -> list[Mapping[tuple[str | int, ...], dict[str, Any]]]:
        """Return the nodes of row shards in the tree of each rank, by their places."""
        ranks = range(self.world_size)
        self._open(ranks)
        return [self._tensors_of(old).shards for old in ranks]

    @property
    def world_size(self) -> int:
        """Number of ranks that took the snapshot."""
        return int(self._snapshot.manifest["world_size"])

    @property
    def runs(self) -> dict[str, list[Run]]:
        """The blocks that are read of each file."""
        stems = [self._snapshot.stem(rank) for rank in self._documents]
        files = self._snapshot.manifest["files"]
        documents = {f"{stem}.json": [(0, blocks_in(files[f"{stem}.json"]["bytes"]))] for stem in stems}
        return {**documents, **{name: file.runs for name, file in self._files.items()}}

    def read(self, also: Mapping[str, list[Run]] | None = None) -> None:
        """Read the planned bytes, and verify the blocks in `also`, by file."""
        more = also or {}
        for name in more:
            if name.endswith(".safetensors"):
                self._document(self._rank_of(name))
                self._file(name)
            else:
                self._verified(name)
        for name, file in self._files.items():
            file.read(more.get(name, ()))
        for target, old, node, rows in self._late:
            tree = self._planned[old]
            target.copy_(decode(node, self._tensors(tree.files, tree.own, [node["name"]]))[rows])

    def trees(self) -> list[Any]:
        """Return the planned trees; the tensors are the caller's."""
        trees, given = list[Any](), set[tuple[str, str]]()
        for tree in self._planned:
            tensors = self._tensors(tree.files, tree.own, tree.names)
            for name in tree.names:
                key = tree.files.get(name, tree.own), name
                if key in given:  # another tree has it already, and may change it
                    tensors[name] = tensors[name].clone()
                given.add(key)
            with damaged_on_error(self.where):
                trees.append(decode(tree.document, tensors, tree.shards, tree.parts))
        return trees

    def _tensors_of(self, rank: int) -> StoredTensors:
        """Return the tensors of all parts of the tree that `rank` gave."""
        if rank not in self._found:
            self._found[rank] = tensors_of(self._document(rank)["tree"])
        return self._found[rank]

    def _plan(self, rank: int, parts: Collection[str] | None, shards: Mapping[int, RowShard | Tensor]) -> None:
        document = self._document(rank)
        own = f"{self._snapshot.stem(rank)}.safetensors"
        listed = {f"{stem}.safetensors": names for stem, names in document["elsewhere"].items()}
        files = {name: file for file, names in listed.items() if self._rank_of(file) >= 0 for name in names}
        found = self._tensors_of(rank) if parts is None else tensors_of(document["tree"], parts)
        kept = {place: node for place, node in found.shards.items() if parts is None or place[0] in parts}
        names = {**found.names, **{node["rows"]["name"]: None for node in kept.values() if id(node) not in shards}}
        self._planned.append(_PlannedTree(document["tree"], own, files, [*names], parts, shards))
        self._file(own)
        for name in names:
            self._want(files.get(name, own), name)

    def _shard(
        self, place: Sequence[str | int], node: dict[str, Any], held: Sequence[dict[str, Any]], rank: int, size: int
    ) -> RowShard:
        """Return the rows of `rank` of `size`, to be read from those of the old ranks.

        Args:
            place: of the node in every tree.
            node: of one rank.
            held: nodes of all old ranks.
            rank: in the new world.
            size: number of shards in the new world.
        """
        world, shape = self.world_size, sizes(node["shape"])
        wanted = rows_of_rank(shape[0], rank, size)
        ranges = [range(one["start"], one["start"] + one["rows"]["shape"][0]) for one in held]
        try:
            sources = find_rows(ranges if len(held) == world else [], wanted, shape[0])
        except NotExact as error:
            raise NotExact(
                f"{self.where}: {'/'.join(map(str, place))}, a distributed tensor of {shape}, cannot be assembled "
                f"from those of the ranks: {error}. Resume with {world} ranks and the strategy of the snapshot."
            ) from error
        key = (
            wanted,
            shape,
            held[0]["rows"]["dtype"],
            *((old, held[old]["rows"]["name"], held[old]["rows"].get("offset")) for old, _ in sources),
        )
        if key not in self._rows:
            self._rows[key] = self._rows_of(sources, held, ranges, wanted, shape[1:])
        return RowShard(self._rows[key], wanted.start, shape)

    def _rows_of(
        self,
        sources: Sequence[tuple[int, range]],
        held: Sequence[dict[str, Any]],
        ranges: Sequence[range],
        wanted: range,
        shape: Sequence[int],
    ) -> Tensor:
        dtype = torch_dtype(held[0]["rows"]["dtype"])
        row_bytes = prod(shape) * dtype.itemsize
        entries = {old: self._entry(old, held[old]["rows"], len(ranges[old]) * row_bytes) for old, _ in sources}
        memory = torch.empty(len(wanted) * row_bytes, dtype=torch.uint8)
        for old, rows in sources:
            first, own = rows.start - ranges[old].start, rows.start - wanted.start
            target = memory[own * row_bytes :][: len(rows) * row_bytes]
            if (found := entries[old]) is not None:
                file, start = found
                file.want(start + first * row_bytes, target)
            else:
                node, into = held[old]["rows"], target.view(dtype).view(len(rows), *shape)
                self._want(self._file_of(old, node["name"]), node["name"])
                self._late.append((into, old, node, slice(first, first + len(rows))))
        return memory.view(dtype).view(len(wanted), *shape)

    def _entry(self, rank: int, node: dict[str, Any], nbytes: int) -> tuple[TensorFile, int] | None:
        """Return the file and the first byte of rows that are a range of it; None for other layouts."""
        if "offset" in node or node.get("strides"):
            return None
        file = self._file(self._file_of(rank, node["name"]))
        entry = file.entries[node["name"]]
        if entry.end - entry.start != nbytes:
            raise ValueError(f"rows of {nbytes} bytes in tensor {node['name']} of {entry.end - entry.start}")
        return file, entry.start

    def _file_of(self, rank: int, tensor: str) -> str:
        """Return the name of the file with `tensor` of the tree of `rank`."""
        elsewhere = self._document(rank)["elsewhere"]
        stem = next((stem for stem, names in elsewhere.items() if tensor in names), self._snapshot.stem(rank))
        return f"{stem}.safetensors"

    def _want(self, name: str, tensor: str) -> None:
        file = self._file(name)
        if (name, tensor) not in self._memory:
            entry = file.entries[tensor]
            self._memory[name, tensor] = memory = torch.empty(entry.end - entry.start, dtype=torch.uint8)
            file.want(entry.start, memory)

    def _tensors(self, files: Mapping[str, str], own: str, names: Iterable[str]) -> FreshTensors:
        tensors = FreshTensors()
        for name in names:
            file = files.get(name, own)
            entry = self._files[file].entries[name]
            tensors[name] = self._memory[file, name].view(entry.dtype).view(entry.shape)
        return tensors

    def _file(self, name: str) -> TensorFile:
        """Return the open file `name`, read by ranges if the document of its rank was read."""
        if name not in self._files:
            expected = self._snapshot.manifest["files"][name]
            document = self._documents.get(self._rank_of(name))
            table = None if document is None else base64.b64decode(document["blocks"], validate=True)
            self._files[name] = TensorFile(self._store, f"{self._snapshot.path}/{name}", expected, table)
        return self._files[name]

    def _rank_of(self, name: str) -> int:
        """Return the rank that wrote the file `name`; KeyError if none did."""
        return {f"{self._snapshot.stem(rank)}.safetensors": rank for rank in range(self.world_size)}[name]

    def _open(self, ranks: Iterable[int]) -> None:
        """Read the documents of `ranks` and the headers of their files, several at once."""

        def opened(rank: int) -> None:
            self._document(rank)
            self._file(f"{self._snapshot.stem(rank)}.safetensors")

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            deque(pool.map(opened, ranks), maxlen=0)

    def _document(self, rank: int) -> dict[str, Any]:
        if rank not in self._documents:
            self._documents[rank] = json.loads(self._verified(f"{self._snapshot.stem(rank)}.json"))
        return self._documents[rank]

    def _verified(self, name: str) -> bytes:
        return read_verified(self._store, f"{self._snapshot.path}/{name}", self._snapshot.manifest["files"][name])


@dataclass(frozen=True)
class _PlannedTree:
    """A tree to be decoded.

    Args:
        document: of the tree.
        own: the file of its rank.
        files: tensor -> its file, if that is another rank's.
        names: of the tensors that are decoded.
        parts: keys of the tree that are decoded; None for all.
        shards: by the id of its node: what to put there instead of the written row shard.
    """

    document: Any
    own: str
    files: dict[str, str]
    names: list[str]
    parts: Collection[str] | None
    shards: Mapping[int, RowShard | Tensor]


def unread(
    snapshot: Snapshot, everyone: Sequence[Mapping[str, Sequence[Run]]], rank: int, size: int
) -> dict[str, list[Run]]:
    """Return the blocks that `rank` of `size` ranks verifies, of those that none of them reads.

    Args:
        snapshot: the snapshot.
        everyone: the blocks that each rank reads, by file.
        rank: this rank.
        size: number of ranks.
    """
    left: list[tuple[str, Run]] = []
    for name, digest in snapshot.manifest["files"].items():
        taken = join_runs([run for runs in everyone for run in runs.get(name, ())])
        blocks = max(1, blocks_in(digest["bytes"]))  # of an empty file its size is compared
        starts, ends = [0, *(end for _, end in taken)], [*(first for first, _ in taken), blocks]
        left += [(name, gap) for gap in zip(starts, ends, strict=True) if gap[0] < gap[1]]
    total = sum(end - first for _, (first, end) in left)
    begin, stop = total * rank // size, total * (rank + 1) // size
    share, at = dict[str, list[Run]](), 0
    for name, (first, end) in left:
        low, high = max(begin - at, 0), min(stop - at, end - first)
        if low < high and (name.endswith(".safetensors") or low == 0):  # other files are verified as a whole
            share.setdefault(name, []).append((first + low, first + high))
        at += end - first
    return share


def read(store: Store, snapshot: Snapshot, rank: int) -> Any:
    """Return the tree that `rank` gave to `snapshot`, from verified files.

    Raises:
        SnapshotDamaged: a file is missing or differs from the manifest.
        SnapshotError: the snapshot was taken by fewer ranks.
    """
    reader = SnapshotReader(store, snapshot)
    reader.plan(rank)
    reader.read()
    return reader.trees()[0]


def read_whole(store: Store, snapshot: Snapshot, *parts: str) -> list[dict[str, Any]]:
    """Return the trees of all ranks, with these parts alone, and whole tensors as row shards.

    Raises:
        SnapshotDamaged: a file is missing or differs from the manifest.
        NotExact: the ranks do not hold all rows of a tensor.
    """
    reader = SnapshotReader(store, snapshot)
    reader.plan_merged(0, 1, parts, of_first=parts)
    reader.read()
    return reader.trees()


def read_weights(store: Store, weights: Snapshot, rows: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """Return whole weights, or row shards of those that each rank has written its rows of.

    Args:
        store: of the run.
        weights: which.
        rows: index of the wanted shard, and the number of shards.

    Raises:
        SnapshotDamaged: a file is missing or differs from the manifest.
        NotExact: the ranks do not hold all rows of a tensor.
    """
    reader = SnapshotReader(store, weights)
    reader.plan_merged(*rows, (), as_tensors=rows[1] == 1)
    reader.read()
    found: dict[str, Any] = reader.trees()[0]
    return found


def read_part(store: Store, snapshot: Snapshot, rank: int, name: str) -> Any:
    """Return the part `name` of that tree, which must hold no tensors; no tensor is read.

    Raises:
        SnapshotDamaged: its file is missing or differs from the manifest, or the snapshot has no such part.
    """
    with damaged_on_error(f"{store.url}/{snapshot.path}"):
        document = f"{snapshot.stem(rank)}.json"
        data = read_verified(store, f"{snapshot.path}/{document}", snapshot.manifest["files"][document])
        return decode({name: json.loads(data)["tree"][name]}, {})[name]


@dataclass(frozen=True)
class Weights:
    """A module's state_dict, and the facts in its manifest, such as the metrics it reached."""

    state_dict: dict[str, Any]
    facts: dict[str, Any]

    def complete(self, base: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Return a whole state_dict; an adapter's is completed by that of `base`."""
        return {**base(), **self.state_dict} if "kept" in self.facts else self.state_dict


@error_with_remedy()
def load_weights(store: Store, folder: str, rows: tuple[int, int] = (0, 1)) -> Weights:
    """Return the weights in `folder` ("best" or "last") that count; `rows` as of `read_weights`.

    Raises:
        SnapshotMissing: none were saved.
        SnapshotDamaged: a file is missing or differs from the manifest.
    """
    while (saved := newest_weights(store, folder)) is not None:
        try:
            return Weights(read_weights(store, saved, rows), saved.manifest["facts"])
        except SnapshotDamaged:
            if store.exists(f"{saved.path}/{MANIFEST}"):
                raise  # else newer ones took their place meanwhile
    raise SnapshotMissing(f"no weights were saved in {store.url}/{folder}")


def weights_at(path: str | os.PathLike[str], rows: tuple[int, int] = (0, 1)) -> Weights:
    """Return the weights at `path`.

    Args:
        path: folder or URL: a run's `best` or `last`, one of the weights in it, a copy of one, or a snapshot. Or a
            file that `save_checkpoint` or `midstride export` wrote.
        rows: as of `read_weights`, for `best` and `last`.

    Raises:
        SnapshotMissing: none were saved there.
        SnapshotDamaged: a file is missing or differs from its manifest, or is no checkpoint.
    """
    path = os.fspath(path)
    if Path(path).is_file():
        return _of_checkpoint(path)
    url, _, folder = path.rstrip("/").rpartition("/")
    if url.endswith(f"/{SNAPSHOTS}") and parse_name(folder):
        return _of_snapshot(open_run(url.removesuffix(f"/{SNAPSHOTS}")), folder)
    store = Store.open(url or ".")
    if (copy := copied_weights(store, folder)) is not None:
        return Weights(read_weights(store, copy, rows), copy.manifest["facts"])
    return load_weights(with_parent(store), folder, rows)


def _of_snapshot(store: Store, name: str) -> Weights:
    """Return the weights in the snapshot called `name`, put together from its ranks."""
    snapshot = Catalog(store).get(name)
    if snapshot is None:
        raise SnapshotMissing(f"{store.url}/{SNAPSHOTS}/{name} is no committed snapshot, or was removed meanwhile")
    whole: dict[str, Any] = {}
    for tree in read_whole(store, snapshot, "module"):  # a rank has rows of the tensors, or layers
        whole = {**tree["module"], **whole}
    return Weights({name: whole_tensor(value) for name, value in whole.items()}, {"step": snapshot.position.step})


def _of_checkpoint(path: str) -> Weights:
    """Return the weights in a file of Lightning's or safetensors' format, executing nothing."""
    if path.endswith(".safetensors"):
        with damaged_on_error(path):
            return Weights(load_file(path), {})
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise SnapshotDamaged(
            f"{path} is damaged, or holds more than tensors and plain values. If you trust who wrote it, load the "
            f'weights yourself: module.load_state_dict(torch.load("{path}", weights_only=False)["state_dict"])'
        ) from error
    if not isinstance(found, Mapping) or "state_dict" not in found:
        raise SnapshotDamaged(
            f"{path} has no state_dict: use a file that trainer.save_checkpoint or midstride export wrote"
        )
    return Weights(found["state_dict"], {"hparams": dict(found.get("hyper_parameters", {}))})
