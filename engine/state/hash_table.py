"""The hash table of a set: where its items stand, where some were removed, and where `pop` looks next.

A set iterates in the order of its table. Two sets of one order come apart as soon as they change, unless their tables
are alike. CPython tells nothing of a table: it is read where it lies in memory. None is written there; a table is made
anew by insertions and removals alone, and read again.
"""

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice, permutations
from typing import Any

import numpy as np

__all__ = ["HashTable", "described_table", "fill_set", "is_as_described"]

#: orders of insertion that are tried for a set whose table is unknown
_ORDERS = 120
#: items of such a set beyond which only the order itself is tried, and its reverse
_MOST = 1000
#: what has one hash in every process; text has one where PYTHONHASHSEED says so
_NUMBERS = (bool, int, float, complex)
_TEXTS = (str, bytes)

#: a table is made with at most so many slots for what it holds then, and none is free again before the next is made
_SLOTS_PER_ITEM = 8
#: the finger that a smaller set may have: larger ones take longer to make than to warn of
_FARTHEST = 1 << 20
#: an item that was removed leaves this in its slot
_REMOVED_HASH = -1


class _Set(ctypes.Structure):
    """The first fields of `PySetObject`, of CPython's Include/cpython/setobject.h."""

    _fields_ = (
        ("head", ctypes.c_byte * object.__basicsize__),
        ("fill", ctypes.c_ssize_t),
        ("used", ctypes.c_ssize_t),
        ("mask", ctypes.c_ssize_t),
        ("table", ctypes.c_void_p),
        ("hash", ctypes.c_ssize_t),
        ("finger", ctypes.c_ssize_t),
    )


class _Placeholder:
    """Takes the slot that it names."""

    def __init__(self, slot: int) -> None:
        self._slot = slot

    def __hash__(self) -> int:
        return self._slot


class _Echo:
    """Counts as one item more where a table is made large enough for what comes, and then is found to be there."""

    def __init__(self, item: Any) -> None:
        self._item = item

    def __hash__(self) -> int:
        return hash(self._item)

    def __eq__(self, other: object) -> bool:
        return other is self._item


@dataclass(frozen=True)
class HashTable:
    """Where the items of a set stand.

    Args:
        size: slots; a power of 2, 8 or more.
        slots: those of the items, in their order.
        removed: those out of which items were removed.
        finger: the slot from which on `pop` looks for an item, as it was counted when it was set: a table that grew or
            shrank since takes it modulo its size. 0 before the first `pop`.
    """

    size: int
    slots: Sequence[int]
    removed: Sequence[int]
    finger: int

    @classmethod
    def of(cls, items: set[Any]) -> "HashTable":
        """Return that of `items`."""
        found = _Set.from_address(id(items))
        size = found.mask + 1
        memory = (ctypes.c_ssize_t * (2 * size)).from_address(found.table)
        keys, hashes = np.frombuffer(memory, np.intp).reshape(size, 2).T
        is_removed = (keys != 0) & (hashes == _REMOVED_HASH)
        finger = 0 if found.finger == _far(size) else found.finger
        return cls(size, _indices((keys != 0) & ~is_removed), _indices(is_removed), finger)

    def fill(self, target: set[Any], items: list[Any]) -> bool:
        """Let `target` hold `items` in a table like this one; return whether it does."""
        target.clear()
        if not self._is_sound(len(items)):
            return False
        if _Set.from_address(id(target)).finger != self.finger:
            _turn(target, self.finger or _far(self.size))
        placeholders = {slot: _Placeholder(slot) for slot in (*self.slots, *self.removed)}
        if placeholders:
            first = list(placeholders.values())[: self.size // 8]
            target.update(first)
            if HashTable.of(target).size < self.size:
                _enlarge(target, first, self.size)
            target.update(placeholders.values())
        for item, slot in zip(items, self.slots, strict=True):
            target.discard(placeholders[slot])
            target.add(item)  # takes the one slot on its way out of which something was removed
        for slot in self.removed:
            target.discard(placeholders[slot])
        return list(target) == items and HashTable.of(target) == self

    def _is_sound(self, items: int) -> bool:
        """Return whether a set of so many items can have this table: a snapshot may come from anywhere."""
        if not isinstance(self.slots, list) or not isinstance(self.removed, list):
            return False
        taken = [*self.slots, *self.removed]
        if {int} != set(map(type, (self.size, self.finger, *taken))) or len(self.slots) != items:
            return False
        return (
            8 <= self.size <= max(8, _SLOTS_PER_ITEM * len(taken))
            and self.size & (self.size - 1) == 0
            and len(set(taken)) == len(taken)
            and all(0 <= slot < self.size for slot in taken)
            and 0 <= self.finger <= max(_FARTHEST, self.size)
        )


def described_table(value: set[Any] | frozenset[Any], items: list[Any]) -> dict[str, Any]:
    """Return `value`'s table as "table"; nothing where `set(items)` has it too, or where items hash anew each time."""
    if type(value) is not set or not _IS_READABLE or not _has_lasting_hashes(items):
        return {}
    table, plain = HashTable.of(value), set(items)
    return {} if list(plain) == items and HashTable.of(plain) == table else {"table": asdict(table)}


def is_as_described(value: set[Any] | frozenset[Any], items: list[Any], table: Mapping[str, Any] | None) -> bool:
    """Return whether `value` is a set of `items` of which `described_table` says `table`."""
    return list(value) == items and described_table(value, items).get("table") == table


def fill_set(target: set[Any], items: list[Any], table: Mapping[str, Any] | None = None) -> bool:
    """Let `target` hold `items`, in their order where a set of them can have it; return whether it is as it was.

    Args:
        target: is filled.
        items: in the order in which they are to be.
        table: what `described_table` said; where it said nothing, that of `set(items)`.
    """
    if table is None and _IS_READABLE and _Set.from_address(id(target)).finger and _has_lasting_hashes(items):
        table = asdict(HashTable.of(set(items)))  # `pop` would go on where it is
    if table is not None and HashTable(**table).fill(target, items):
        return True
    for order, removed in _insertions(items):
        target.clear()
        target.update(order)
        target.update(removed)
        target.difference_update(removed)
        if list(target) == items:
            return table is None
    target.clear()
    target.update(items)
    return False


def _insertions(items: list[Any]) -> Any:
    """Yield orders of insertion, each with what is added after it and removed again: that makes the table larger."""
    yield items, ()
    yield items[::-1], ()
    if len(items) > _MOST:
        return
    taken = set(items)
    for factor in (2, 4, 8, 16, 32):
        for base in (0, 1 << 40):
            padding = [number for number in range(base, base + factor * (len(items) + 4)) if number not in taken]
            for order in (items, items[::-1]):
                yield order, padding
                if base == 0:
                    yield list(chain(padding, order)), padding
    if len(items) <= 8:
        for permutation in islice(permutations(items), _ORDERS):
            yield permutation, ()


def _far(size: int) -> int:
    """Return what stands for a finger of 0, which no `pop` leaves: the first slot of a table of `size`, and of most."""
    return max(3 << 11, 3 * size)


def _turn(target: set[Any], finger: int) -> None:
    """Let `pop` look from `finger` on in the empty `target`: it goes on behind what it took last."""
    last, size = finger - 1, 1 << (finger - 1).bit_length()
    crowd = {slot: _Placeholder(slot) for slot in (last, *range(size // 8))}
    target.update(crowd.values())
    _enlarge(target, list(crowd.values()), size)
    for slot in crowd.keys() - {last}:
        target.discard(crowd[slot])
    target.pop()
    target.clear()


def _enlarge(target: set[Any], there: list[_Placeholder], size: int) -> None:
    """Let `target`, in which a few items are, have at least `size` slots, a power of 2, by an update with the same few.

    CPython makes a table for twice the items that there may be after an update, before it knows which are there.
    """
    target.update({_Echo(there[number % len(there)]) for number in range(size // 4)})


def _indices(which: Any) -> Sequence[int]:
    found: list[int] = np.flatnonzero(which).tolist()
    return found


def _has_lasting_hashes(items: Sequence[Any]) -> bool:
    """Return whether all items have the hashes in another process that they have in this one."""
    lasting = _NUMBERS if os.environ.get("PYTHONHASHSEED", "random") == "random" else (*_NUMBERS, *_TEXTS)
    return all(type(item) in lasting or (type(item) is tuple and _has_lasting_hashes(item)) for item in items)


def _is_readable() -> bool:
    """Return whether this interpreter's sets lie in memory as is written here."""
    few = {5}
    found = _Set.from_address(id(few))
    return (found.fill, found.used, found.mask) == (1, 1, 7) and HashTable.of(few) == HashTable(8, [5], [], 0)


_IS_READABLE = _is_readable()
