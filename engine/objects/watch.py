"""Warns once of unwritable state: opaque objects, newly shared arrays, changed hooks."""

import ctypes
import logging
import types
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import xxhash
from torch import Tensor

from midstride.engine.formatting import format_names
from midstride.engine.objects.array_memory import ArrayMemory, address_of, bounds_of, owner_of
from midstride.engine.objects.kinds.opaque import DATA, class_found, is_remade
from midstride.engine.objects.kinds.tensors import has_memory
from midstride.engine.objects.user_modules import function_called
from midstride.engine.objects.walk import DEEPEST, GraphWalk
from midstride.engine.state.object_nodes import kind_name
from midstride.engine.state.tensors import other_kind

__all__ = ["ArraySharing", "NoUnwritableWarnings", "RegisteredHooks", "UnwritableWarnings", "shown"]

log = logging.getLogger(__name__)

#: number of names up to which a path is shown whole
_LONG = 12
_BY_HOOKS = "on_save_checkpoint and on_load_checkpoint"
#: of objects in a loop, which has no hooks
_BY_METHODS = "state_dict and load_state_dict of a class of your own that holds it"
#: name of a class -> what to keep instead of its objects
_KEPT_AS = {"DTensor": "what its full_tensor() returns instead, called on every rank"}


class UnwritableWarnings:
    """Warns of values met by walks that no snapshot can hold."""

    def __init__(self) -> None:
        self._reported: set[str] = set()
        self._constants: dict[str, str] = {}
        self._ignored: set[str] = set()  #: paths of what reading data makes
        self._sharing = ArraySharing()

    def begin(self, walk: GraphWalk) -> None:
        """Warn of values at the start of training; record functions and classes as constants."""
        self._sharing.begin(walk)
        self.warn(walk)
        self._constants = dict(walk.constants)

    def warn(self, walk: GraphWalk) -> None:
        """Warn once of each value that cannot be written.

        One line names the attributes of modules with one class, and one line all others.
        """
        found: dict[str, list[str]] = {}
        beside: dict[str, str] = {}
        for path, value in walk.opaque.items():
            if path in self._reported:
                continue
            self._reported.add(path)
            if path.startswith("module/"):
                found.setdefault(_kind(value), []).append(_attribute(path))
            elif not issubclass(type(value), DATA):  # a weak proxy fails to say its class
                beside[f"{shown(path)}, a {_class(_kind(value))}"] = _kind(value)
        if beside:
            are_kept = all(name.startswith("kept.") for name in beside)
            log.warning(
                "not part of snapshots: %s. If training changes it, keep it by %s%s",
                format_names([*beside]),
                _BY_METHODS if are_kept else _BY_HOOKS,
                _example(beside.values()),
            )
        for kind, names in found.items():
            log.warning(
                "the module's attribute %s, a %s, is not part of snapshots; if training changes it, keep %s%s",
                format_names(names),
                _class(kind),
                _KEPT_AS.get(_class(kind), f"it by {_BY_HOOKS}"),
                _example([kind]),
            )
        if deep := [path for path in walk.deep if _add(self._reported, path)]:
            log.warning(
                "nested deeper than %d levels; deeper parts are in no snapshot: %s. Keep it flat, in a list",
                DEEPEST,
                format_names([shown(path) for path in deep]),
            )
        self._warn_of_early_ids(walk)
        self._warn_of_sharing(walk)

    def _warn_of_early_ids(self, walk: GraphWalk) -> None:
        """Warn of ids that are kept before their objects, which no snapshot can tell from numbers."""
        early = [walk.seen[number][0] for number in walk.numbers & walk.seen.keys()]
        if early := [path for path in early if _add(self._reported, f"id of {path}")]:
            log.warning(
                "the id() of %s is kept before the object itself, and is another one in a resumed run. Keep the object "
                "in place of its id, or the ids in an attribute that is set later",
                format_names([shown(path) for path in sorted(early)]),
            )

    def _warn_of_sharing(self, walk: GraphWalk) -> None:
        """Warn of arrays that came to share memory in training and were written to."""
        for paths in self._sharing.written(walk):
            log.warning(
                "training made these share memory and writes into it: %s. A resumed run has each array in its own "
                "memory: use tensors, or make them in __init__",
                format_names([shown(path) for path in paths]),
            )

    def ignore(self, paths: Iterable[str]) -> None:
        """Warn of nothing at `paths` from now on."""
        self._ignored.update(paths)
        self._reported.update(paths)

    def warn_of_replaced(self, walk: GraphWalk, roots: Iterable[str]) -> None:
        """Warn of functions and objects set in training that no other attempt would have.

        Args:
            walk: the walk that met them.
            roots: paths of the owners at whose attributes the walk began.
        """
        before, known = self._constants, Counter(self._constants.values())
        number = Counter(walk.constants.values())
        now = {**walk.constants, **{path: kind_name(type(value)) for path, value in walk.opaque.items()}}
        new = {
            path: kind
            for path, kind in now.items()
            if not path.startswith("hooks") and path not in self._ignored
            if before.get(path, kind if path in self._reported else None) != kind
        }
        values = {path: value for path, value in walk.seen.values()} if new else {}
        lines = []
        for path, kind in new.items():
            name, _, code = kind.partition(" ")  # of functions that share their name with others
            value = values.get(path)
            if path in walk.functions:
                # One that is built serves once; without a closure it can be copied.
                is_built = known[kind] == 1 and (number[kind] == 1 or getattr(value, "__closure__", None) is None)
                is_found = is_built or function_called(name) is not None
            else:
                is_found = isinstance(value, type) and (is_remade(name) or class_found(name) is not None)
            if not is_found and _add(self._reported, f"now {kind} in {_owner(path, roots)}"):
                lines.append(f"{shown(path)} (now {name}{', of other code' if code else ''})")
        if lines:
            log.warning(
                "set in training to a value that no snapshot can hold: %s. A resumed run has the value that its code "
                "sets: set it in __init__ or setup, or again in on_load_checkpoint",
                format_names(lines),
            )


class NoUnwritableWarnings(UnwritableWarnings):
    """Warns of nothing, for values that no snapshot holds."""

    def begin(self, walk: GraphWalk) -> None:
        """Warn of nothing."""

    def warn(self, walk: GraphWalk) -> None:
        """Warn of nothing."""

    def warn_of_replaced(self, walk: GraphWalk, roots: Iterable[str]) -> None:
        """Warn of nothing."""


def _add(names: set[str], name: str) -> bool:
    """Add `name`; return whether it is new."""
    is_new = name not in names
    names.add(name)
    return is_new


def _owner(path: str, roots: Iterable[str]) -> str:
    """Return the path of the root's attribute that contains `path`."""
    root = max((root for root in roots if path.startswith(f"{root}/")), key=len, default="")
    return f"{root}/{path.removeprefix(f'{root}/').partition('/')[0]}"


def _kind(value: Any) -> str:
    """Return the class of `value` as text; for an unwritable tensor, with its kind (nested)."""
    kind = kind_name(type(value))
    other = other_kind(value) if issubclass(type(value), Tensor) else None
    return kind if other is None else kind.replace(":", f":{other} ")


def _example(kinds: Iterable[str]) -> str:
    """Return text that leads to an example of how to keep such objects; "" if there is none."""
    is_environment = any(kind.startswith("gymnasium.") for kind in kinds)
    return ". docs/module.md shows how, under An environment of gymnasium" if is_environment else ""


def _class(kind: str) -> str:
    """Return the name of a class without its module."""
    return kind.rpartition(".")[2].rpartition(":")[2]


def _attribute(path: str) -> str:
    """Return `path` as code in the module writes it: without the group."""
    return shown(path.partition("/")[2])


def shown(path: str) -> str:
    """Return `path` as code writes it; a long path is shortened to its beginning and end."""
    names = [name for name in path.split("/") if name]
    return ".".join(names if len(names) <= _LONG else [*names[: _LONG // 2], "...", *names[-2:]])


#: bytes of memory beyond which only so many of them are sampled with each snapshot
_LARGE_BYTES, _SAMPLES = 1 << 20, 30_000


class ArraySharing:
    """Finds memory that arrays came to share with other arrays or tensors, and that is written.

    Arrays that every attempt builds are filled in place and still share memory in a resumed run; others do not.
    """

    def __init__(self) -> None:
        #: path, place in the memory, strides
        self._built: set[tuple[str, int, tuple[int, ...]]] = set()
        self._named: set[str] = set()
        #: by the memory's begin and end
        self._before: dict[tuple[int, int], _Written] = {}

    def begin(self, walk: GraphWalk) -> None:
        """Record which arrays share memory when training begins, as in every attempt."""
        for (start, _), group in _groups(walk):
            self._built |= {_place(path, value, start) for path, value in group.items()}
        self.written(walk)

    def written(self, walk: GraphWalk) -> list[list[str]]:
        """Return paths of arrays that came to share memory whose content changes, each group once."""
        found, now = [], {}
        for memory, group in _groups(walk):
            now[memory], before = _Written.of(group.values(), memory), self._before.get(memory)
            is_built = self._built.issuperset(_place(path, value, memory[0]) for path, value in group.items())
            if is_built or before is None or not self._named.isdisjoint(group):
                continue
            if before.has_changed(now[memory].owners):
                self._named.update(group)
                found.append([*group])
        self._before = now
        return found


class _Written(NamedTuple):
    """Digest of the memory between two addresses, and the arrays and tensors that keep it alive."""

    span: tuple[int, int]
    digest: int
    owners: tuple["weakref.ref[Any]", ...]

    @classmethod
    def of(cls, members: Collection[Any], memory: tuple[int, int]) -> "_Written":
        """Return the digest of what `members` take of `memory`, behind which tensors can end."""
        bounds = [*map(bounds_of, members)]
        span = max(memory[0], min(begin for begin, _ in bounds)), min(memory[1], max(end for _, end in bounds))
        owners = (one if isinstance(one, Tensor) else owner_of(one) for one in members)
        return cls(span, _digest_between(*span), tuple(map(weakref.ref, owners)))

    def has_changed(self, owners: Iterable["weakref.ref[Any]"]) -> bool:
        """Return whether the same memory, which one of `owners` keeps alive, has other content now."""
        alive = {id(owner()) for owner in self.owners if owner() is not None}
        return not alive.isdisjoint(id(owner()) for owner in owners) and _digest_between(*self.span) != self.digest


def _place(path: str, value: Any, start: int) -> tuple[str, int, tuple[int, ...]]:
    """Return the path of an array or tensor, its distance in bytes from `start`, its strides."""
    if isinstance(value, Tensor):
        return path, value.data_ptr() - start, value.stride()
    return path, address_of(value) - start, value.strides


def _groups(walk: GraphWalk) -> list[tuple[tuple[int, int], dict[str, Any]]]:
    """Return groups, by path, of arrays and tensors that share memory, at least one an array.

    Each comes with the addresses where its memory begins and ends.
    """
    members: dict[tuple[int, int], dict[str, Any]] = {}
    arrays = {path: value for path, value in walk.seen.values() if _is_watched(value)}
    if not arrays:
        return []
    memory = ArrayMemory(arrays.values())
    tensors = ((path, one) for path, one in walk.seen.values() if _is_tensor(one) and one.is_cpu)
    for path, value in (*arrays.items(), *((path, one) for path, one in tensors if has_memory(one))):
        if (span := memory.span_of(value)) is not None:
            members.setdefault(span, {})[path] = value
    groups = ((span, _overlapping(group)) for span, group in members.items() if len(group) > 1)
    return [(span, group) for span, group in groups if group]


def _is_tensor(value: object) -> TypeGuard[Tensor]:
    return issubclass(type(value), Tensor)  # a dead weak proxy does not tell its class to isinstance


def _is_watched(value: object) -> bool:
    return type(value) is np.ndarray and value.dtype != object and value.flags.writeable and value.size > 0


def _overlapping(group: dict[str, Any]) -> dict[str, Any]:
    """Return those of `group` whose elements overlap with those of another member."""
    bounds = {path: bounds_of(value) for path, value in group.items()}
    found: set[str] = set()
    before = last = ""
    for path in sorted(group, key=bounds.__getitem__):
        for other in filter(None, (before, last)):
            if bounds[path][0] < bounds[other][1] and _share(group[path], group[other]):
                found |= {path, other}
        before = path
        last = path if not last or bounds[path][1] > bounds[last][1] else last
    return {path: value for path, value in group.items() if path in found}


def _share(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.shares_memory(one, other)
    return isinstance(one, np.ndarray) or isinstance(other, np.ndarray)  # tensors alone go on to share


def _digest_between(start: int, end: int) -> int:
    """Return a digest of the bytes between two addresses; of many, of some spread over them."""
    memory = np.frombuffer(memoryview((ctypes.c_char * (end - start)).from_address(start)), dtype=np.uint8)
    step = 1 if memory.nbytes <= _LARGE_BYTES else memory.nbytes // _SAMPLES | 1
    return xxhash.xxh3_64_intdigest(memory[::step].tobytes())


class RegisteredHooks:
    """Warns of hooks that training registers or removes, which a resumed run would not.

    Args:
        hooks: by the path of their owner, and by where they are registered, when training begins.
    """

    def __init__(self, hooks: Mapping[str, Mapping[str, Any]]) -> None:
        self._before = _hook_counts(hooks)
        self._reported: set[str] = set()

    def compare(self, hooks: Mapping[str, Mapping[str, Any]]) -> None:
        """Warn, once, of each difference between `hooks` and those that training began with."""
        now = _hook_counts(hooks)
        lines = [
            *(f"{name} is new" for name in now - self._before),
            *(f"{name} is gone" for name in self._before - now),
        ]
        if lines := [line for line in lines if line not in self._reported]:
            self._reported.update(lines)
            log.warning(
                "training added or removed hooks, which no snapshot holds: %s. A resumed run has the hooks that its "
                "code registers: register them in __init__ or setup and let an attribute decide what they do, or do "
                "it again in on_load_checkpoint",
                format_names(lines),
            )


def _hook_counts(hooks: Mapping[str, Mapping[str, Any]]) -> Counter[str]:
    """Return how often each hook is registered under each name; the order does not count."""
    named = ((path.removeprefix("hooks").strip("/") or "the module", owned) for path, owned in hooks.items())
    return Counter(
        f"{_hook_kind(hook)} in {owner}.{name.rpartition('_')[0].strip('_')}"
        for owner, owned in named
        for name, hook in owned.items()
    )


def _hook_kind(hook: Any) -> str:
    function = getattr(hook, "__func__", hook)
    kind = f"{function.__module__}:{function.__qualname__}" if isinstance(function, types.FunctionType) else None
    return kind or kind_name(type(hook))
