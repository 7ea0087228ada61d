"""The items of an epoch in snapshots: as arrays if they are numbers or lists of numbers."""

from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from midstride.engine.errors import UnsupportedState
from midstride.engine.state.codec import encode_lazily

__all__ = ["Items", "as_items", "digest_of_items", "pack_items", "unpack_items"]

#: plain indices as an array of shape (n,), other items as a list
Items = list[Any] | NDArray[np.int64]


def as_items(given: list[Any]) -> Items:
    """Return the items of a sampler, as an array if all are of type int."""
    return np.array(given, dtype=np.int64) if all(type(item) is int for item in given) else given


def digest_of_items(items: Items) -> str:
    """Return a digest of `items` in their order."""
    return xxhash.xxh3_64_hexdigest(repr(items).encode() if isinstance(items, list) else items.tobytes())


def pack_items(items: Items) -> dict[str, Any] | None:
    """Return `items` as a dict that can be written to a snapshot; None if they cannot be written."""
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


def _smallest(indices: NDArray[np.int64]) -> NDArray[Any]:
    """Return `indices` in the smallest integer dtype that holds them."""
    if len(indices) == 0:
        return indices
    return indices.astype(np.promote_types(np.min_scalar_type(indices.min()), np.min_scalar_type(indices.max())))
