"""Digest of module, data, their classes and globals at the end of a training.

Two digests differ where a training kept state that no snapshot holds.
"""

import io
import itertools
import marshal
import operator
import types
from collections import deque
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from midstride.engine.code_origin import is_user_class
from midstride.engine.objects.attributes import INTERNAL, attributes_of, members_of
from midstride.engine.objects.kinds.functions import Cached, code_digest, describe_cache
from midstride.engine.objects.kinds.generators import MAIN_GENERATORS, Generator, get_state
from midstride.engine.objects.kinds.iterators import ITERATORS, parts_of_iterator
from midstride.engine.objects.kinds.library_objects import DEPTH, MANY
from midstride.engine.objects.kinds.plain import PLAIN, VALUES
from midstride.engine.objects.roots import class_and_global_state, is_code, is_data
from midstride.engine.state.object_nodes import kind_text
from midstride.engine.state.tensor_digest import tensor_digest

__all__ = ["differing_lines", "digest_lines", "object_digest", "users_lines"]

#: bytes of an array that are read whole, in 0.1 s; larger ones, in files or on accelerators are sampled
_WHOLE_BYTES, _SAMPLE_BYTES = 1 << 30, 1 << 26
#: largest number of items of which one digest is made
_MOST_ITEMS = 10_000
#: largest number of lines of one value
_MOST_LINES = 10_000
_NOT_STATE = INTERNAL | {"_trainer"}
#: what torch and its schedulers set on an optimizer, without its groups
_OF_OPTIMIZERS = frozenset(
    {
        *("state", "defaults", "step", "zero_grad", "_opt_called", "_zero_grad_profile_name"),
        "_warned_capturable_if_run_uncaptured",
    }
)
_MAIN_GENERATORS = frozenset(map(id, MAIN_GENERATORS))
_CONTAINERS = (dict, list, tuple, deque)
#: types that are described by their name
_NAMED = (type, types.ModuleType, types.MethodType, types.BuiltinFunctionType, types.MethodDescriptorType)
#: types that are described by their `repr`
_TOLD = (
    *(itertools.count, types.GenericAlias, torch.dtype, torch.device, np.dtype, np.ufunc),
    *(operator.itemgetter, operator.attrgetter, operator.methodcaller),
)


def object_digest(module: nn.Module, data: object, callbacks: Sequence[object]) -> dict[str, str]:
    """Return one line for every attribute, by name."""
    lines: dict[str, str] = {}
    seen: dict[int, object] = {}  # objects, kept so that no other takes the place of one that is gone
    others = ((type(callback).__name__, callback) for callback in callbacks)
    for name, root in (("module", module), ("data", data), *others):
        lines.update(_walk(name, root, DEPTH, seen))
    for name, value in class_and_global_state(list(seen.values())):
        lines.update(_walk(name, value, 2, seen))
    return lines


def digest_lines(name: str, value: object, known: Mapping[int, str] | None = None) -> dict[str, str]:
    """Return one line for each item in `value`, by name.

    Args:
        name: of the value.
        value: what is described.
        known: address -> text of objects that are described by this text alone.
    """
    return dict(itertools.islice(_walk(name, value, DEPTH, {}, known=known or {}), _MOST_LINES))


def users_lines(name: str, value: object) -> dict[str, str]:
    """Return one line for each item in `value`, by name.

    Walks into the user's objects and plain containers only.
    """
    plain = (*_CONTAINERS, partial)
    lines = _walk(name, value, DEPTH, {}, lambda item: isinstance(item, plain) or is_user_class(type(item)))
    return dict(itertools.islice(lines, _MOST_LINES))


def differing_lines(undisturbed: Mapping[str, str], resumed: Mapping[str, str]) -> list[str]:
    """Return a line for each difference."""
    names = [name for name in undisturbed if undisturbed[name] != resumed.get(name)]
    return [f"{name}: {resumed.get(name, 'missing')} resumed, {undisturbed[name]} undisturbed" for name in names]


def _walk(
    name: str,
    value: Any,
    depth: int,
    seen: dict[int, object],
    into: Callable[[Any], bool] = lambda item: True,
    known: Mapping[int, str] = types.MappingProxyType({}),
) -> Iterator[tuple[str, str]]:
    if id(value) in _MAIN_GENERATORS:
        return
    if (told := known.get(id(value)) or _describe(value)) is not None:
        yield name, told
    elif id(value) not in seen and depth and into(value):
        seen[id(value)] = value
        for step, item in itertools.islice(_members(value, known), MANY):
            yield from _walk(name + step, item, depth - 1, seen, into, known)


def _members(value: Any, known: Container[int]) -> Iterator[tuple[str, Any]]:
    """Yield the parts of `value`, each with the code that reaches it."""
    if isinstance(value, nn.Module):
        yield from _members_of_module(value, known)
    elif isinstance(value, Optimizer):
        own = attributes_of(value)
        yield from ((f".{key}", item) for key, item in own.items() if not _is_of_optimizers(key))
        yield from ((f".state[{number}]", item) for number, item in enumerate(own.get("state", {}).values()))
    elif isinstance(value, (*ITERATORS, types.GeneratorType, partial)):
        yield from ((f" ({number})", item) for number, item in enumerate(_parts(value)))
    elif is_data(value):
        if isinstance(value, (list, tuple, dict, deque)):
            yield " holds", f"{len(value)} items"
        items = value.tolist() if isinstance(value, np.ndarray) else value
        if isinstance(items, (list, tuple)) and len(items) > MANY:  # some from everywhere
            yield " in all", _of_all(items)
            yield from ((f"[{at}]", items[at]) for at in range(0, len(items), -(-len(items) // (MANY - 1))))
        else:
            yield from members_of(items)
    elif not is_code(value):  # an object of a library that is called
        yield from members_of(value)


def _members_of_module(module: nn.Module, known: Container[int]) -> Iterator[tuple[str, Any]]:
    """Yield weights, buffers and attributes of the layers; of a library's module, tensors alone.

    A library sets other attributes as it runs, such as those of a DistributedDataParallel.
    """
    has_state = _has_tensors if not is_user_class(type(module)) else lambda item: True
    for path, layer in module.named_modules():
        if id(layer) in known:
            yield f".{path}", layer
            continue
        prefix = f".{path}." if path else "."
        own = ((key, item) for key, item in attributes_of(layer).items() if key not in _NOT_STATE and has_state(item))
        weights, buffers = layer.named_parameters(recurse=False), layer.named_buffers(recurse=False)
        yield from ((prefix + key, item) for key, item in chain(own, weights, buffers))


def _has_tensors(value: object) -> bool:
    """Return whether `value` is a tensor or a list of tensors, as the states of metrics are."""
    return isinstance(value, Tensor) or (type(value) is list and bool(value) and isinstance(value[0], Tensor))


def _is_of_optimizers(name: str) -> bool:
    """Return whether torch sets the attribute on each optimizer; its states are told by number."""
    return name in _OF_OPTIMIZERS or name.endswith("_hooks")


def _parts(iterator: Any) -> Sequence[Any]:
    """Return arguments of an iterator or partial, or a generator's position and variables."""
    if isinstance(iterator, partial):
        return [iterator.func, iterator.args, iterator.keywords, vars(iterator)]
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return [frame.f_lasti, dict(frame.f_locals)] if frame is not None else []
    return parts_of_iterator(iterator) or ()


def _describe(value: Any) -> str | None:
    """Return a short description of `value`; None if only its items can be described."""
    if isinstance(value, types.FunctionType):  # first: most of what a training refers to are functions
        return " ".join(filter(None, (kind_text(value.__module__, value.__qualname__), code_digest(value))))
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    if isinstance(value, (Tensor, np.ndarray)):
        if getattr(value.dtype, "hasobject", False):
            return None
        kind = str(value.dtype).removeprefix("torch.")
        shape = "[nested]" if getattr(value, "is_nested", False) else list(value.shape)
        return f"{kind}{shape} {_of_array(value)}"
    if isinstance(value, (list, tuple, dict, deque, set, frozenset)):
        return _describe_items(value)
    if isinstance(value, Generator):
        state = get_state(value)
        return f"{type(value).__name__} in state {_short(repr(state.tolist() if isinstance(state, Tensor) else state))}"
    return _describe_position(value) or _describe_content(value)


def _describe_position(value: Any) -> str | None:
    """Return a position in a file or iterator, a context variable's value, or code's cache."""
    if isinstance(value, io.IOBase):
        return _describe_file(value)
    if isinstance(value, ContextVar):
        return repr(value.get(None))
    if isinstance(value, _NAMED):
        return kind_text(getattr(value, "__module__", None), getattr(value, "__qualname__", value.__name__))
    if isinstance(value, Cached):
        return describe_cache(value)
    if isinstance(value, _TOLD) or type(value) in VALUES:
        return repr(value)
    counts = hasattr(type(value), "__length_hint__")  # of its class: what is looked at may be a class itself
    left = operator.length_hint(value, -1) if counts else -1  # itertools.repeat has one that raises
    return f"{left} items left" if left >= 0 else None


def _describe_file(file: io.IOBase) -> str:
    if file.closed:
        return "closed"
    try:
        # A text whose lines are being read does not tell where it is, what it reads from does.
        return f"at byte {getattr(file, 'buffer', file).tell()}" if file.seekable() else "open"
    except (OSError, ValueError):  # one of a library
        return "open"


def _describe_items(value: Collection[Any]) -> str | None:
    """Return number and digest of the items of a set, or of many numbers, in any order."""
    is_set = isinstance(value, (set, frozenset))
    if not is_set and len(value) <= MANY:
        return None
    items = [*value, *value.values()] if isinstance(value, dict) else value
    if not PLAIN.issuperset(map(type, items)):
        return f"{len(value)} items" if is_set else None
    texts = sorted(map(repr, items)) if is_set else [*map(repr, items)]
    return f"{len(value)} items {texts if len(texts) <= 5 else _short(' '.join(texts))}"


def _describe_content(value: Any) -> str | None:
    """Return a digest of the memory of `value`: a table, a ctypes object, an `array.array`."""
    if hasattr(type(value), "__array__"):
        found = np.asarray(value)
        return f"{list(found.shape)} {_short(repr(found.tolist())) if found.dtype.hasobject else _of_array(found)}"
    if callable(getattr(type(value), "qsize", None)) and not hasattr(value, "__dict__"):
        return f"{value.qsize()} items"
    try:
        return _short(bytes(memoryview(value)))
    except (TypeError, BufferError, ValueError):
        return None


def _of_all(items: Sequence[Any]) -> str | None:
    """Return one digest of many numbers, texts and arrays; None if they are too many."""
    if len(items) > _MOST_ITEMS:
        return None
    texts = []
    for item in items:
        if isinstance(item, (Tensor, np.ndarray)) and not getattr(item.dtype, "hasobject", False):
            texts.append(_of_array(item))
        elif (content := _marshalled(item)) is not None:
            texts.append(_short(content))
        else:
            return None
    return _short("".join(texts))


def _marshalled(value: Any) -> bytes | None:
    try:
        return marshal.dumps(value, 0)  # without references, which depend on what else holds a part of it
    except ValueError:
        return None


def _of_array(value: Any) -> str:
    """Return a digest of a tensor or array; of a large one, of some of its elements."""
    if isinstance(value, Tensor):
        is_whole = value.is_cpu and value.numel() * value.element_size() <= _WHOLE_BYTES
        return tensor_digest(value, None if is_whole else _SAMPLE_BYTES)[:6]
    is_in_memory = not isinstance(value, np.memmap) and not isinstance(value.base, np.memmap)
    if value.nbytes > (_WHOLE_BYTES if is_in_memory else _SAMPLE_BYTES):
        value = value.reshape(-1)[:: -(-value.nbytes // _SAMPLE_BYTES)]
    return _short(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)


def _short(content: Any) -> str:
    return xxhash.xxh3_64_hexdigest(content.encode() if isinstance(content, str) else content)[:6]
