"""Items that a sampler gave for an epoch: held, digested, packed for snapshots."""

import marshal
import sys
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from midstride.engine.data.iterable.content_digest import content_digest
from midstride.engine.data.permutation import Positions
from midstride.engine.errors import UnsupportedState
from midstride.engine.state.codec import encode_lazily

__all__ = ["DrawnItems", "Items", "as_items", "digest_of_items", "is_plain", "joined", "pack_items", "unpack_items"]

#: plain indices as an array of shape (n,), other items as a list
Items = list[Any] | NDArray[np.int64]
#: largest number of objects that a digest of an epoch takes in
_DIGESTED = 1024


class DrawnItems:
    """The items of an epoch that were drawn and not dropped."""

    #: number of first items that are not dropped: DistributedSampler repeats them at the end of an epoch
    HEAD = 1024

    def __init__(self) -> None:
        #: items that were not dropped
        self.kept: Items = []
        #: first items of an epoch that is drawn in blocks
        self.head: Items = []
        self._first = 0

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def end(self) -> int:
        """Number of items drawn."""
        return self._first + len(self.kept)

    def begin(self, items: Items | None) -> None:
        """Start an epoch with all of its items; None to add them later."""
        self.kept, self.head, self._first = [] if items is None else items, [], 0

    def add(self, items: Items) -> None:
        """Add the next items of the epoch."""
        if len(self.head) < self.HEAD:
            self.head = joined([self.head, items[: self.HEAD - len(self.head)]])
        self.kept = joined([self.kept, items])

    def drop(self, first: int) -> None:
        """Drop the items before `first`, except the head."""
        if first > self._first:
            self.kept, self._first = self.kept[first - self._first :], min(first, self.end)

    def at(self, positions: Positions) -> list[Any]:
        """Return the items at `positions`."""
        if self._first == 0 and not isinstance(self.kept, list):
            return list(self.kept[positions].tolist())
        first, kept, head = self._first, self.kept, self.head
        found = [kept[at - first] if at >= first else head[at] for at in positions.tolist()]
        return [item.item() for item in found] if found and isinstance(kept, np.ndarray) else found


def as_items(given: list[Any]) -> Items:
    """Return the items of a sampler, as an array if all are of type int."""
    return np.array(given, dtype=np.int64) if all(type(item) is int for item in given) else given


def digest_of_items(items: Items) -> str:
    """Return a digest of `items` in their order, by content; of many objects, of some."""
    if not isinstance(items, list):
        return xxhash.xxh3_64_hexdigest(items.tobytes())
    if not is_plain(items):  # objects, whose text may show their address, or leave out their content
        step = 1 if isinstance(items[0], torch.Tensor) else -(-len(items) // _DIGESTED)
        return f"{content_digest([len(items), *items[::step], items[-1]]):016x}"
    with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
        return xxhash.xxh3_64_hexdigest(repr(items).encode())


def is_plain(items: Items) -> bool:
    """Return whether `items` are numbers, texts, or containers of such."""
    try:  # a hundred times as fast as `pack_items`
        return not isinstance(items, list) or bool(marshal.dumps(items))
    except ValueError:
        return False


def pack_items(items: Items) -> dict[str, Any] | None:
    """Return `items` as a dict for a snapshot; None if they cannot be written."""
    if not isinstance(items, list):
        return {"indices": _smallest(items)}
    if not items:
        return {"items": []}
    kinds = {*map(type, items)}
    if len(kinds) == 1 and issubclass(kind := next(iter(kinds)), np.integer):
        return {"indices": np.array(items, dtype=kind), "scalars": True}
    if kinds <= {list} and all(type(index) is int for item in items for index in item):
        flat = np.array([index for item in items for index in item], dtype=np.int64)
        return {"indices": _smallest(flat), "sizes": _smallest(np.array([len(item) for item in items], dtype=np.int64))}
    try:
        encode_lazily(items)
    except UnsupportedState:
        return None
    return {"items": items}


def unpack_items(packed: dict[str, Any]) -> Items:
    """Return the items from the result of `pack_items`."""
    if "items" in packed:
        return list(packed["items"])
    if "scalars" in packed:
        return list(packed["indices"])
    indices: NDArray[np.int64] = packed["indices"].astype(np.int64)
    if "sizes" not in packed:
        return indices
    ends = np.cumsum(packed["sizes"].astype(np.int64))
    return [batch.tolist() for batch in np.split(indices, ends[:-1])]


def joined(blocks: list[Items]) -> Items:
    """Return the items of all blocks: an array if all are arrays."""
    blocks = [block for block in blocks if len(block)]
    if len(blocks) == 1:
        return blocks[0]
    if blocks and not any(isinstance(block, list) for block in blocks):
        return np.concatenate(blocks)
    return [item for block in blocks for item in (block if isinstance(block, list) else block.tolist())]


def _smallest(indices: NDArray[np.int64]) -> NDArray[Any]:
    """Return `indices` in the smallest integer dtype that holds them."""
    if len(indices) == 0:
        return indices
    return indices.astype(np.promote_types(np.min_scalar_type(indices.min()), np.min_scalar_type(indices.max())))
