"""Warns, once, of objects of a run that no file can hold."""

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from midstride.engine.formatting import format_names
from midstride.engine.objects.array_sharing import ArraySharing
from midstride.engine.objects.node_writers import DATA
from midstride.engine.objects.plain_values import kind_name
from midstride.engine.objects.user_modules import function_called
from midstride.engine.objects.walk import DEEPEST, GraphWalk
from midstride.engine.state.tensors import other_kind

__all__ = ["NoUnwritableWarnings", "UnwritableWarnings", "shown"]

log = logging.getLogger(__name__)

#: number of names up to which a path is shown whole
_LONG = 12
#: name of a class -> what to keep instead of its objects
_KEPT_AS = {"DTensor": "what its full_tensor() returns instead, called on every rank"}


class UnwritableWarnings:
    """Warns of values met by walks that no snapshot can hold."""

    def __init__(self) -> None:
        self._reported: set[str] = set()
        self._constants: dict[str, str] = {}
        self._sharing = ArraySharing()

    def begin(self, walk: GraphWalk) -> None:
        """Warn of values that exist when training begins; record functions and classes, which every attempt has."""
        self._sharing.begin(walk)
        self.warn(walk)
        self._constants = dict(walk.constants)

    def warn(self, walk: GraphWalk) -> None:
        """Warn once of each value that cannot be written: one line per class in modules, one line for all others."""
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
            log.warning(
                "not part of snapshots: %s. If training changes it, keep it by on_save_checkpoint and "
                "on_load_checkpoint%s",
                format_names([*beside]),
                _example(beside.values()),
            )
        for kind, names in found.items():
            log.warning(
                "the module's attribute %s, a %s, is not part of snapshots; if training changes it, keep %s%s",
                format_names(names),
                _class(kind),
                _KEPT_AS.get(_class(kind), "it by on_save_checkpoint and on_load_checkpoint"),
                _example([kind]),
            )
        if deep := [path for path in walk.deep if _add(self._reported, path)]:
            log.warning(
                "nested deeper than %d levels, and from there on not part of snapshots: %s. Keep it flat, in a list",
                DEEPEST,
                format_names([shown(path) for path in deep]),
            )
        self._warn_of_sharing(walk)

    def _warn_of_sharing(self, walk: GraphWalk) -> None:
        """Warn of arrays that came to share memory in training and were written to."""
        for paths in self._sharing.written(walk):
            log.warning(
                "these came to share memory in training, which writes into it: %s. A resumed run has each array in "
                "memory of its own: use tensors, or make them in __init__",
                format_names([shown(path) for path in paths]),
            )

    def warn_of_replaced(self, walk: GraphWalk, roots: Iterable[str]) -> None:
        """Warn of functions and objects that were set in training, and that no other attempt would have.

        Args:
            walk: the walk that met them.
            roots: paths of the owners at whose attributes the walk began.
        """
        before, known = self._constants, Counter(self._constants.values())
        now = {**walk.constants, **{path: kind_name(type(value)) for path, value in walk.opaque.items()}}
        lines = []
        for path, kind in now.items():
            if path.startswith("hooks") or before.get(path, kind if path in self._reported else None) == kind:
                continue
            name, _, code = kind.partition(" ")  # of functions that share their name with others
            is_found = path in walk.functions and (known[kind] == 1 or function_called(name) is not None)
            if not is_found and _add(self._reported, f"now {kind} in {_owner(path, roots)}"):
                lines.append(f"{shown(path)} (now {name}{', of other code' if code else ''})")
        if lines:
            log.warning(
                "set in training to what no snapshot can hold: %s. A resumed run has there what it is built with: set "
                "it in __init__ or setup, or again in on_load_checkpoint",
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
    """Return the class of `value` as text; for a tensor that cannot be written, with its kind, such as nested."""
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
