"""Digests of samples, which have no indices in iterable data sets."""

import marshal
import pickle
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_intdigest

from midstride.engine.objects.attributes import attributes_of

__all__ = ["content_digest", "stack_of"]

#: levels of nested containers and objects that are digested
_MAX_DEPTH = 16
#: number of items from which on they are digested together
_MIN_ITEMS = 4
#: largest number of parts of a sample that is digested by columns
_MAX_COLUMNS = 64
#: largest number of elements of a tensor that is stacked with others for its digest
_MAX_NUMEL = 4096
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
#: marshal version without references and interned strings, which differ between processes
_VERSION = 0
_dtype = attrgetter("dtype")


def content_digest(samples: Any, stack: Tensor | None = None) -> int:
    """Return a 64-bit digest of the bits and the structure of `samples`.

    Args:
        samples: samples of one batch.
        stack: the result of `stack_of(samples)`, if it is known.
    """
    if stack is not None:
        return xxh3_64_intdigest(marshal.dumps(_stack_content(stack), _VERSION))
    try:
        plain = marshal.dumps(samples, _VERSION)  # ten times faster, but for plain values only
    except ValueError:
        plain = marshal.dumps(_plain(samples, _MAX_DEPTH), _VERSION)
    return xxh3_64_intdigest(plain)


def stack_of(samples: Any) -> Tensor | None:
    """Return the stack of small equal-shaped tensors, as of `default_collate`, else None."""
    if not _are_tensors(samples) or not 0 < samples[0].numel() <= _MAX_NUMEL:
        return None
    if samples[0].shape != samples[-1].shape:  # such as sequences; faster than an error of torch.stack
        return None
    try:
        stack = torch.stack(samples)
    except RuntimeError:  # shapes differ
        return None
    return stack if stack.layout is torch.strided else None


def _plain(value: Any, deep: int) -> Any:
    """Return nested plain values that represent `value`."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return _tensor_content(value)
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        return value.dtype.str, value.shape, xxh3_64_intdigest(value.tobytes())
    if deep == 0:
        return kind.__qualname__
    if isinstance(value, (list, tuple)):
        return _items_content(value, deep)
    if isinstance(value, (set, frozenset)):  # their order differs between processes
        return sorted(content_digest(item) for item in value)
    if isinstance(value, Mapping):
        return [(_plain(key, deep - 1), _plain(item, deep - 1)) for key, item in value.items()]
    return kind.__qualname__, _object_content(value, deep)


def _items_content(items: Sequence[Any], deep: int) -> Any:
    """Return plain values for `items`.

    Items of one form share a digest, which takes a third of the time.
    """
    if (stack := stack_of(items)) is not None:
        return _stack_content(stack)
    if _are_tensors(items) and {(item.shape, item.layout) for item in items} == {(items[0].shape, torch.strided)}:
        return _tensors_content(items)
    if not _are_rows(items):
        return [_plain(item, deep - 1) for item in items]
    kind, first = type(items[0]), items[0]
    columns = [(key, [item[key] for item in items]) for key in (first if kind is dict else range(len(first)))]
    return kind.__name__, len(items), [(_plain(key, deep - 1), _plain(column, deep - 1)) for key, column in columns]


def _are_rows(items: Sequence[Any]) -> bool:
    """Return whether `items` are containers of one type with the same keys or length."""
    kind = type(items[0]) if len(items) >= _MIN_ITEMS else None
    if kind not in (list, tuple, dict) or len(items[0]) > _MAX_COLUMNS or {*map(type, items)} != {kind}:
        return False
    if kind is dict:
        return all(item.keys() == items[0].keys() for item in items)
    return len({*map(len, items)}) == 1


def _are_tensors(items: Any) -> bool:
    """Return whether `items` are at least `_MIN_ITEMS` tensors of one dtype."""
    if not isinstance(items, (list, tuple)) or len(items) < _MIN_ITEMS or {*map(type, items)} != {Tensor}:
        return False
    return len({*map(_dtype, items)}) == 1


def _stack_content(stack: Tensor) -> Any:
    return "stack", *_tensor_content(stack)


def _tensors_content(items: Sequence[Tensor]) -> Any:
    """Return the same as `_stack_content` of the stacked `items`, without stacking them."""
    words = xxh3_64()
    for item in items:
        words.update(_bytes(item))
    return "stack", str(items[0].dtype), (len(items), *items[0].shape), words.intdigest()


def _tensor_content(tensor: Tensor) -> Any:
    if tensor.is_nested:
        return "nested", [_tensor_content(part) for part in tensor.unbind()]
    shape = tuple(tensor.shape)
    if tensor.layout != torch.strided:
        return shape, [_tensor_content(tensor.coalesce().indices()), _tensor_content(tensor.coalesce().values())]
    return str(tensor.dtype), shape, xxh3_64_intdigest(_bytes(tensor))


def _bytes(tensor: Tensor) -> Any:
    """Return the bytes of a tensor, without a copy if it is contiguous and on the CPU."""
    try:
        array = tensor.numpy()
    except (RuntimeError, TypeError):  # not on the CPU, requires gradients, or of a dtype that numpy lacks
        array = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(array).data


def _object_content(value: Any, deep: int) -> Any:
    if attributes := attributes_of(value):
        return _plain(attributes, deep - 1)
    try:
        return pickle.dumps(value)
    except Exception:  # only its type is digested
        return None
