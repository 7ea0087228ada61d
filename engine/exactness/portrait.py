"""The portrait of a life at its end: everything its module, its data, their classes and their files' globals hold.

What differs between two portraits is where a life kept what no snapshot holds.
"""

import inspect
import io
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash
from torch import Tensor, nn

from midstride.engine.data.held import Generator, get_state
from midstride.engine.exactness.places import is_users

__all__ = ["compared", "portrait"]

DEPTH = 5
_INTERNAL = frozenset(vars(nn.Module())) | {"_trainer"}


def portrait(module: nn.Module, data: object, callbacks: Sequence[object] = ()) -> dict[str, str]:
    """Return what can be said in a line of every attribute, by name."""
    lines: dict[str, str] = {}
    seen: dict[int, object] = {}  # objects, kept so that no other takes the place of one that is gone
    others = ((type(callback).__name__, callback) for callback in callbacks)
    for name, root in (("module", module), ("data", data), *others):
        lines.update(_walk(name, root, DEPTH, seen))
    kinds = {kind for value in list(seen.values()) for kind in type(value).__mro__ if is_users(kind)}
    for kind in sorted(kinds, key=lambda kind: kind.__qualname__):
        for name, value in vars(kind).items():
            if not name.startswith("__") and _is_data(value):
                lines.update(_walk(f"class {kind.__qualname__}: {name}", value, 2, seen))
    for file in sorted({kind.__module__ for kind in kinds} & set(sys.modules)):
        for name, value in vars(sys.modules[file]).items():
            if not name.startswith("_") and _is_data(value):
                lines.update(_walk(f"global {file}.{name}", value, 2, seen))
    return lines


def compared(undisturbed: Mapping[str, str], resumed: Mapping[str, str]) -> list[str]:
    """Return what differs, a line each."""
    names = [name for name in undisturbed if undisturbed[name] != resumed.get(name)]
    return [f"{name}: {resumed.get(name, 'missing')} resumed, {undisturbed[name]} undisturbed" for name in names]


def _is_data(value: object) -> bool:
    return not (callable(value) or inspect.ismodule(value) or inspect.isdatadescriptor(value) or _is_wrapper(value))


def _is_wrapper(value: object) -> bool:
    return isinstance(value, (classmethod, staticmethod, property))


def _walk(name: str, value: Any, depth: int, seen: dict[int, object]) -> Iterator[tuple[str, str]]:
    if (told := _told(value)) is not None:
        yield name, told
    elif id(value) not in seen and depth:
        seen[id(value)] = value
        for part, item in itertools.islice(_parts(value), 1000):
            yield from _walk(name + part, item, depth - 1, seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what `value` consists of, and how each part is reached from it."""
    if isinstance(value, nn.Module):
        for path, part in value.named_modules():
            prefix = f".{path}." if path else "."
            yield from ((prefix + key, item) for key, item in vars(part).items() if key not in _INTERNAL)
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield " holds", f"{len(value)} items"
        yield from ((f"[{place}]", item) for place, item in enumerate(value))
    elif _is_data(value) and hasattr(value, "__dict__"):
        yield from ((f".{key}", item) for key, item in vars(value).items())


def _told(value: Any) -> str | None:
    """Return what `value` is in a few words; None if only its parts can be told."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    if isinstance(value, (Tensor, np.ndarray)):
        array = value.detach().cpu().contiguous().numpy() if isinstance(value, Tensor) else value
        kind = str(value.dtype).removeprefix("torch.")
        return f"{kind}{list(value.shape)} {_short(array.tobytes())}"
    if isinstance(value, (set, frozenset)):
        return f"{len(value)} items" + (f" {sorted(map(repr, value))}" if len(value) <= 5 else "")
    if isinstance(value, io.IOBase):
        return "closed" if value.closed else f"at byte {value.tell()}" if value.seekable() else "open"
    if isinstance(value, Generator):
        state = get_state(value)
        return f"{type(value).__name__} in state {_short(repr(state.tolist() if isinstance(state, Tensor) else state))}"
    if isinstance(value, itertools.count) or hasattr(value, "__length_hint__"):
        return repr(value) if isinstance(value, itertools.count) else f"{value.__length_hint__()} items left"
    return None


def _short(content: str | bytes) -> str:
    return xxhash.xxh3_64_hexdigest(content.encode() if isinstance(content, str) else content)[:6]
