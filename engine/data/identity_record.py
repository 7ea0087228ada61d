"""Whether attributes are as they were, told by identity: in a fraction of the time that a walk through them takes."""

import types
from collections.abc import Iterable, Mapping
from itertools import chain
from operator import is_
from typing import Any

from midstride.engine.code_origin import is_user_class
from midstride.engine.objects.attributes import attributes_of, made_by
from midstride.engine.objects.plain_values import PLAIN, is_large

__all__ = ["IdentityRecord"]

#: values beyond which a walk is as good
_MOST = 400
_OF_FUNCTIONS = ("__closure__", "__defaults__", "__kwdefaults__", "__dict__")


class IdentityRecord:
    """What some owners of attributes hold, as the objects that they are.

    It is of no use where one of them can change and stay the same object: a small tensor, an object of a library. What
    is large counts as unchanged, since a walk leaves it out.

    Args:
        owners: the attributes of each.
    """

    def __init__(self, owners: Iterable[Mapping[str, Any]]) -> None:
        #: objects, with their class and what they hold; None for what is large, and for what may hold more than shows
        self._seen: dict[int, tuple[Any, type, list[Any] | None]] = {}
        self._values = 0
        self._owners = [_flat(own) for own in owners]
        self._tells = all(map(self._enter, chain.from_iterable(self._owners)))

    def is_unchanged(self, owners: Iterable[Mapping[str, Any]]) -> bool:
        """Return whether the owners certainly hold what they held: nothing in them has been replaced."""
        if not self._tells:
            return False
        now = [_flat(own) for own in owners]
        return (
            len(now) == len(self._owners)
            and all(map(_are, now, self._owners))
            and all(
                type(value) is kind and (is_large(value) if parts is None else _are(_parts(value), parts))
                for value, kind, parts in self._seen.values()
            )
        )

    def _enter(self, value: Any) -> bool:
        """Take note of what can change in `value`; return whether there is not too much of it."""
        kind = type(value)
        if kind in PLAIN or id(value) in self._seen:
            return True
        parts = None if is_large(value) else _parts(value)
        self._seen[id(value)] = value, kind, parts
        self._values += len(parts or ())
        return self._values <= _MOST and all(map(self._enter, parts or ()))


def _flat(own: Mapping[str, Any]) -> list[Any]:
    return [*own, *own.values()]


def _parts(value: Any) -> list[Any] | None:
    """Return what a container or an object holds; None if it may hold more than that."""
    kind = type(value)
    if kind in (list, tuple):
        return [*value]
    if kind is dict:
        return _flat(value)
    if kind is types.FunctionType:
        return None if any(getattr(value, name) for name in _OF_FUNCTIONS) else []
    return _flat(attributes_of(value)) if is_user_class(kind) and made_by(kind) is object else None


def _are(now: list[Any] | None, then: list[Any] | None) -> bool:
    return now is not None and then is not None and len(now) == len(then) and all(map(is_, now, then))
