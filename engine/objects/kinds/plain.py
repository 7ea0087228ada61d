"""Plain values: written as they are, or as the arguments that make them again."""

import logging
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PosixPath, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import torch

from midstride.engine.objects.classes import class_called
from midstride.engine.objects.kinds.kind import MISSING, Kind
from midstride.engine.objects.kinds.opaque import CLASS, OPAQUE, class_found, is_remade
from midstride.engine.state.object_nodes import Instance, Same, kind_name, kind_text, step

if TYPE_CHECKING:
    from midstride.engine.objects.restore import GraphRestore
    from midstride.engine.objects.walk import GraphWalk

__all__ = ["ADDRESSES", "CLASSES", "PLAIN", "VALUES", "Addresses", "Classes", "Enums", "Values"]

#: types of immutable values that are written as they are
PLAIN = frozenset({type(None), bool, int, float, str, complex, bytes, torch.Size, torch.dtype, torch.device})


def _name_of(zone: timezone) -> tuple[str, ...]:
    """Return the name that a zone was given, if any."""
    name = zone.tzname(None)
    return () if name == timezone(zone.utcoffset(None)).tzname(None) else (name,)


class _Arguments(NamedTuple):
    """Way to take a value apart and to make it again."""

    of: Callable[[Any], list[Any]]  #: value -> plain arguments
    make: Callable[..., Any]  #: plain arguments -> value


_CONSTANTS = {
    str(value): value
    for value in (
        *(torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc),
        *(torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d),
        *(torch.per_tensor_affine, torch.per_tensor_symmetric),
        *(torch.per_channel_affine, torch.per_channel_symmetric, torch.per_channel_affine_float_qparams),
    )
}
#: immutable class -> the arguments that make a value of it
VALUES: dict[type, _Arguments] = {
    type(...): _Arguments(lambda value: [], lambda: ...),
    type(NotImplemented): _Arguments(lambda value: [], lambda: NotImplemented),
    range: _Arguments(lambda value: [value.start, value.stop, value.step], range),
    slice: _Arguments(lambda value: [value.start, value.stop, value.step], slice),
    Decimal: _Arguments(lambda value: [str(value)], Decimal),
    Fraction: _Arguments(lambda value: [value.numerator, value.denominator], Fraction),
    PosixPath: _Arguments(lambda value: [str(value)], PosixPath),
    PurePosixPath: _Arguments(lambda value: [str(value)], PurePosixPath),
    re.Pattern: _Arguments(lambda value: [value.pattern, value.flags], re.compile),
    timedelta: _Arguments(lambda value: [value.days, value.seconds, value.microseconds], timedelta),
    date: _Arguments(lambda value: [value.year, value.month, value.day], date),
    datetime: _Arguments(
        lambda value: [value.isoformat(), value.fold],
        lambda text, fold: datetime.fromisoformat(text).replace(fold=fold),
    ),
    time: _Arguments(
        lambda value: [value.isoformat(), value.fold],
        lambda text, fold: time.fromisoformat(text).replace(fold=fold),
    ),
    timezone: _Arguments(
        lambda value: [(offset := value.utcoffset(None)).days, offset.seconds, offset.microseconds, *_name_of(value)],
        lambda days, seconds, micros, *name: timezone(timedelta(days, seconds, micros), *name),
    ),
    ZoneInfo: _Arguments(lambda value: [value.key], ZoneInfo),
    UUID: _Arguments(lambda value: [str(value)], UUID),
    **{
        kind: _Arguments(lambda value: [value.name], logging.getLogger) for kind in (logging.Logger, logging.RootLogger)
    },
    **{type(value): _Arguments(lambda value: [str(value)], _CONSTANTS.__getitem__) for value in _CONSTANTS.values()},
}
_VALUES_BY_NAME = {kind_name(kind): arguments for kind, arguments in VALUES.items()}


class Values(Kind):
    """Immutable values of Python and torch, such as a range or a path; loggers, by their names."""

    form = "value"
    types = tuple(VALUES)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the arguments of a value, and the zone of a time that is not in UTC."""
        zone = getattr(value, "tzinfo", None)
        if zone in (None, UTC):
            return self.instance(value, items=VALUES[type(value)].of(value))
        if type(zone) not in VALUES:
            return OPAQUE.describe(walk, value, path)
        items = VALUES[type(value)].of(value.replace(tzinfo=None))
        return self.instance(value, items=items, zone=walk.node(zone, step(path, "tzinfo")))

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Make the value again, or keep a live logger, which may be another than `getLogger`'s."""
        if node.kind not in _VALUES_BY_NAME:
            return restore.mark_stale(path, node.kind, live)
        if type(live) is logging.Logger and self.instance(live, items=[live.name]) == node:
            return live
        made = _VALUES_BY_NAME[node.kind].make(*node.state["items"])
        zone = restore.value(node.state.get("zone"), MISSING, step(path, "tzinfo"))
        return made if zone is None else made.replace(tzinfo=zone)


class Enums(Kind):
    """Members of enumerations."""

    form = "enum"

    def matches(self, kind: type) -> bool:
        """Return whether `kind` is an enumeration."""
        return issubclass(kind, Enum)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the name of a member; for several flags, or none, their number."""
        if value.name in type(value).__members__:
            return self.instance(value, name=value.name)
        return self.instance(value, value=value.value)

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Return the member of that name."""
        kind = class_called(node.kind, live, Enum)
        if kind is not None and "value" in node.state:
            return kind(node.state["value"])
        if kind is None or node.state["name"] not in kind.__members__:
            return restore.mark_stale(path, f"{node.kind}.{node.state['name']}", live)
        return kind[node.state["name"]]


class Addresses(Kind):
    """Numbers that are the `id` of an object, described before or in another part.

    Ids differ between attempts.
    """

    form = "address"

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return a reference to the object."""
        return self.of(walk.address_of(value))

    def of(self, path: str) -> Instance:
        """Return the node of the `id` of the object at `path`."""
        return self.instance(0, of=Same(path))

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Return the address of the object in this attempt."""
        found = restore.find(node.state["of"].path)
        return restore.mark_stale(path, node.state["of"].path, live) if found is MISSING else id(found)


class Classes(Kind):
    """Classes that are found by their names, or that a library makes.

    Other classes are constants of every attempt.
    """

    form = CLASS

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the name of a class."""
        return Instance(self.form, kind_text(value.__module__, value.__qualname__))

    def lost_part(self, restore: "GraphRestore", node: Any, live: Any, *, is_late: bool) -> Any:
        """Return the node if no such class is found."""
        return None if is_remade(node.kind) or class_found(node.kind) is not None else node

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Return the class of that name."""
        if isinstance(live, type) and kind_text(live.__module__, live.__qualname__) == node.kind:
            return live
        if live is MISSING and is_remade(node.kind):
            restore.mark_changed()
            return live
        found = class_found(node.kind)
        return restore.mark_stale(path, node.kind, live) if found is None else found


ADDRESSES, CLASSES = Addresses(), Classes()
