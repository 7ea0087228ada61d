"""Which objects of libraries are compared between snapshots: those whose attributes are all that they hold."""

import enum
import inspect
import logging
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Container, Iterable
from typing import Any

import numpy as np
from torch import Tensor, nn

from midstride.engine.code_origin import is_user_class
from midstride.engine.objects.attributes import attributes_of, made_by
from midstride.engine.objects.digest import DEPTH, MANY
from midstride.engine.objects.generator_search import Generator
from midstride.engine.objects.plain_values import PLAIN, VALUES, kind_name

__all__ = ["is_comparable"]

#: classes of which a digest tells all that may change
_LEAVES: Any = (
    *(*PLAIN, Tensor, np.ndarray, np.generic, np.dtype, enum.Enum, Generator),
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, logging.Logger, inspect.Signature),
    *(types.GenericAlias, types.UnionType),
)
_SETS = (set, frozenset)
_CONTAINERS = (list, tuple, dict, deque, OrderedDict, defaultdict, *_SETS)


def is_comparable(value: object, anchors: Container[int]) -> bool:
    """Return whether a digest of `value`, an object of a library, shows every change of it.

    It does not of an object that can be closed or is written in C, nor where one is held; and it would show changes of
    what other parts of the state hold, such as weights, and the user's objects.

    Args:
        value: the object.
        anchors: ids of objects in other parts of the state.
    """
    return _is_told(value, DEPTH, anchors, set())


def _is_told(value: Any, depth: int, anchors: Container[int], seen: set[int]) -> bool:
    kind: type = type(value)  # a weak proxy says another's class, or fails
    if id(value) in anchors or issubclass(kind, (nn.Module, nn.Parameter)) or is_user_class(kind):
        return False
    is_constant = issubclass(kind, _LEAVES) or kind_name(kind) in VALUES or kind.__module__ == "typing"
    if is_constant or id(value) in seen:
        return True
    seen.add(id(value))
    members = _members(value, kind)
    return depth > 0 and members is not None and all(_is_told(item, depth - 1, anchors, seen) for item in members)


def _members(value: Any, kind: type) -> Iterable[Any] | None:
    """Return what `value` holds; None if that is not known, or more than a digest tells."""
    if kind in _CONTAINERS or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        is_told = PLAIN.issuperset(map(type, value)) if kind in _SETS else len(value) <= MANY
        return (value.values() if issubclass(kind, dict) else value) if is_told else None
    # Of what can be closed, such as a database, attributes do not show what it holds.
    is_of_attributes = made_by(kind) in (object, types.SimpleNamespace) and not hasattr(kind, "close")
    return attributes_of(value).values() if is_of_attributes and _has_attributes(kind) else None


def _has_attributes(kind: type) -> bool:
    """Return whether objects of `kind` may have attributes: of those of C, such as locks, memory is all there is."""
    return any("__dict__" in vars(base) or "__slots__" in vars(base) for base in kind.__mro__)
