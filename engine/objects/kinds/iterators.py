"""Iterators: of containers, of `itertools`, and over other iterators."""

import itertools
import operator
import warnings
from collections import deque
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from midstride.engine.objects.kinds.kind import MISSING, Kind
from midstride.engine.objects.kinds.opaque import OPAQUE
from midstride.engine.state.object_nodes import Instance, kind_name, step

if TYPE_CHECKING:
    from midstride.engine.objects.restore import GraphRestore
    from midstride.engine.objects.walk import GraphWalk

__all__ = ["ITERATORS", "Counts", "Cursors", "Iterators", "parts_of_iterator"]

#: iterators of Python and of `itertools`
ITERATORS = (
    *(enumerate, filter, map, reversed, zip, itertools.accumulate, itertools.chain, itertools.compress),
    *(itertools.count, itertools.cycle, itertools.dropwhile, itertools.filterfalse, itertools.islice),
    *(itertools.pairwise, itertools.repeat, itertools.starmap, itertools.takewhile, itertools.zip_longest),
)
#: of a list read from its end
_REVERSED: Any = type(reversed([]))
#: an example of each class that cursors read; texts have one of ASCII alone
_READ: tuple[Any, ...] = ([], (), range(0), "a", "ä", b"")
_BY_NAME: dict[str, Any] = {kind_name(kind): kind for kind in ITERATORS}


def _silent() -> AbstractContextManager[Any]:
    """Drop the warning of Python 3.12 and 3.13 that copies of `itertools` will end."""
    return warnings.catch_warnings(action="ignore", category=DeprecationWarning)


def parts_of_iterator(iterator: Any) -> tuple[Any, ...] | None:
    """Return the parts of an iterator for a copy, from `__reduce__`; None if it has none."""
    try:
        with _silent():
            reduced = iterator.__reduce__()
    except TypeError:  # from Python 3.14 on those of itertools have none
        return None
    made_of = reduced[1]
    if isinstance(iterator, itertools.zip_longest):  # it says () of one that it has read to its end
        made_of = (*(iter(()) if part == () else part for part in made_of),)
    return (made_of, *[state for state in reduced[2:3] if state is not None])


class Counts(Kind):
    """`itertools.count`."""

    form = "count"
    is_filled = False
    types = (itertools.count,)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the next number, and the step."""
        if (parts := parts_of_iterator(value)) is None:
            return OPAQUE.describe(walk, value, path)
        walk.meet(value, path)
        return self.instance(value, items=list(walk.items(parts[0], step(path, "items"))))

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Return the live count if it has come as far, else a new one."""
        items = restore.items(node.state["items"], (), step(path, "items"))
        if type(live) is itertools.count and parts_of_iterator(live) == (tuple(items),):
            return restore.record(live, path)
        return restore.record(itertools.count(*items), path)


class Cursors(Kind):
    """Iterators over a list, also from its end, a tuple, a range or a text."""

    form = "cursor"
    is_filled = False
    types: ClassVar[tuple[Any, ...]] = (*map(type, map(iter, _READ)), _REVERSED)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the node of the container, and the position in it: None at its end."""
        walk.meet(value, path)
        reduced = value.__reduce__()
        position = reduced[2] if len(reduced) > 2 else None
        return self.instance(value, of=walk.node(reduced[1][0], step(path, "of")), place=position)

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Set the position of the live iterator, or of a new one over the restored container."""
        fits = live is not MISSING and kind_name(type(live)) == node.kind
        under = live.__reduce__()[1][0] if fits else MISSING
        source = restore.value(node.state["of"], under, step(path, "of"))
        if source is MISSING:
            return restore.mark_stale(path, node.kind, live)
        if not (fits and source is under and restore.claim(live, path, fits=True)):
            live = restore.record((reversed if node.kind == kind_name(_REVERSED) else iter)(source), path)
        position = node.state["place"]
        live.__setstate__(len(source) if position is None else position)
        if position is None:  # read to its end, however long that was
            next(live, None)
        return live


class Iterators(Kind):
    """Iterators over other iterators, such as `zip` and `itertools.chain`."""

    form = "iterator"
    is_filled = False
    types: ClassVar[tuple[Any, ...]] = tuple(kind for kind in ITERATORS if kind is not itertools.count)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the arguments of a copy, and its state."""
        parts = parts_of_iterator(value)
        if parts is None:
            return OPAQUE.describe(walk, value, path)
        walk.meet(value, path)
        return self.instance(value, parts=list(walk.items(parts, step(path, "parts"))))

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Return a new iterator."""
        kind, within = _BY_NAME.get(node.kind), step(path, "parts")
        before = parts_of_iterator(live) if kind is not None and type(live) is kind else None
        parts = restore.items(node.state["parts"], before or (), within)
        is_whole = not any(where.startswith(f"{within}/") for where in restore.stale)
        if kind is None or not is_whole:
            return restore.mark_stale(path, node.kind, live)
        made = kind.__new__(kind, *parts[0])
        with _silent():
            for state in parts[1:]:
                made.__setstate__(state)
        if isinstance(made, itertools.cycle) and parts[1][1]:  # past its first round: a new one counts otherwise
            made = _cycle_in_a_later_round(parts[1][0], left=operator.length_hint(parts[0][0]))
        return restore.record(made, path)


def _cycle_in_a_later_round(items: list[Any], left: int) -> "itertools.cycle[Any]":
    """Return an `itertools.cycle` past its first round, with `left` items of this one to come."""
    made = itertools.cycle(items)
    deque(itertools.islice(made, 3 * len(items) - left), maxlen=0)
    return made
