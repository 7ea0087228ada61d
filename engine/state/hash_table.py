"""Hash table of a set: slots of its items and of removed ones, and next position of `pop`.

A set iterates in the order of its table. Two sets with the same order diverge as soon as they change, unless their
tables are equal. CPython has no interface to the table, so it is read from memory. Memory is never written: a table is
rebuilt by insertions and removals only, and then read again to compare.
"""

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice, permutations
from typing import Any

import numpy as np

__all__ = ["HashTable", "described_table", "fill_set", "is_as_described"]

#: largest number of permutations that are tried for a set whose table is unknown
_ORDERS = 120
#: items of such a set, beyond which only the order itself and its reverse are tried
_MOST = 1000
#: types whose hashes are the same in every process; those of text are if PYTHONHASHSEED is set
_NUMBERS = (bool, int, float, complex)
_TEXTS = (str, bytes)

#: largest number of slots for each item or removed item in a table of CPython
_SLOTS_PER_ITEM = 8
#: largest finger of a small set: a table with a larger one would take long to build, and a warning is given instead
_FARTHEST = 1 << 20
#: hash that a removed item leaves in its slot
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
    """An item whose hash is a slot, so that it is inserted there."""

    def __init__(self, slot: int) -> None:
        self._slot = slot

    def __hash__(self) -> int:
        return self._slot


class _Echo:
    """Equals an item of the set. An update reserves a slot for it and inserts nothing."""

    def __init__(self, item: Any) -> None:
        self._item = item

    def __hash__(self) -> int:
        return hash(self._item)

    def __eq__(self, other: object) -> bool:
        return other is self._item


@dataclass(frozen=True)
class HashTable:
    """The hash table of a set.

    Args:
        size: number of slots; a power of 2, 8 or more.
        slots: slots of the items, in their order.
        removed: slots from which items were removed.
        finger: slot from which on `pop` searches for an item, taken modulo `size`, since the table may have changed its
            size after the last `pop`. 0 before the first `pop`.
    """

    size: int
    slots: Sequence[int]
    removed: Sequence[int]
    finger: int

    @classmethod
    def of(cls, items: set[Any]) -> "HashTable":
        """Return the table of `items`."""
        found = _Set.from_address(id(items))
        size = found.mask + 1
        memory = (ctypes.c_ssize_t * (2 * size)).from_address(found.table)
        keys, hashes = np.frombuffer(memory, np.intp).reshape(size, 2).T
        is_removed = (keys != 0) & (hashes == _REMOVED_HASH)
        finger = 0 if found.finger == _unused_finger(size) else found.finger
        return cls(size, _indices((keys != 0) & ~is_removed), _indices(is_removed), finger)

    def fill(self, target: set[Any], items: list[Any]) -> bool:
        """Replace the items of `target` by `items` so that its table equals this one.

        Return whether it does.
        """
        target.clear()
        if not self._is_sound(len(items)):
            return False
        if _Set.from_address(id(target)).finger != self.finger:
            _set_finger(target, self.finger or _unused_finger(self.size))
        placeholders = {slot: _Placeholder(slot) for slot in (*self.slots, *self.removed)}
        if placeholders:
            first = list(placeholders.values())[: self.size // 8]
            target.update(first)
            if HashTable.of(target).size < self.size:
                _enlarge(target, first, self.size)
            target.update(placeholders.values())
        for item, slot in zip(items, self.slots, strict=True):
            target.discard(placeholders[slot])
            target.add(item)  # goes to the slot of the placeholder: the only one in its probe sequence that is removed
        for slot in self.removed:
            target.discard(placeholders[slot])
        return list(target) == items and HashTable.of(target) == self

    def _is_sound(self, items: int) -> bool:
        """Return whether a set of `items` items can have this table; snapshots are not trusted."""
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
    """Return {"table": ...} for a set; {} if `set(items)` has the same one or hashes differ.

    Hashes can differ between processes.
    """
    if type(value) is not set or not _IS_READABLE or not _has_lasting_hashes(items):
        return {}
    table, plain = HashTable.of(value), set(items)
    return {} if list(plain) == items and HashTable.of(plain) == table else {"table": asdict(table)}


def is_as_described(value: set[Any] | frozenset[Any], items: list[Any], table: Mapping[str, Any] | None) -> bool:
    """Return True if `value` has these items in this order, and `table` as its table."""
    return list(value) == items and described_table(value, items).get("table") == table


def fill_set(target: set[Any], items: list[Any], table: Mapping[str, Any] | None = None) -> bool:
    """Replace the items of `target` by `items`, in order if possible. Return True if in order.

    Args:
        target: the set to fill.
        items: in the order of iteration.
        table: of `described_table`; None stands for the table of `set(items)`.
    """
    if table is None and _IS_READABLE and _Set.from_address(id(target)).finger and _has_lasting_hashes(items):
        table = asdict(HashTable.of(set(items)))  # else `target` would keep its finger
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
    """Yield orders of insertion, each with temporary items that enlarge the table."""
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


def _unused_finger(size: int) -> int:
    """Return a finger that acts as 0, which `pop` cannot set: 0 modulo `size` and other sizes."""
    return max(3 << 11, 3 * size)


def _set_finger(target: set[Any], finger: int) -> None:
    """Set the finger of the empty set `target`, by a `pop` of an item in the slot before it."""
    last, size = finger - 1, 1 << (finger - 1).bit_length()
    crowd = {slot: _Placeholder(slot) for slot in (last, *range(size // 8))}
    target.update(crowd.values())
    _enlarge(target, list(crowd.values()), size)
    for slot in crowd.keys() - {last}:
        target.discard(crowd[slot])
    target.pop()
    target.clear()


def _enlarge(target: set[Any], there: list[_Placeholder], size: int) -> None:
    """Enlarge the table of `target` to at least `size` slots, a power of 2, keeping its items.

    CPython resizes for the largest possible number of items before an update, so an update with equal items does this.
    """
    target.update({_Echo(there[number % len(there)]) for number in range(size // 4)})


def _indices(which: Any) -> Sequence[int]:
    found: list[int] = np.flatnonzero(which).tolist()
    return found


def _has_lasting_hashes(items: Sequence[Any]) -> bool:
    """Return whether the hashes of all items are the same in every process."""
    lasting = _NUMBERS if os.environ.get("PYTHONHASHSEED", "random") == "random" else (*_NUMBERS, *_TEXTS)
    return all(type(item) in lasting or (type(item) is tuple and _has_lasting_hashes(item)) for item in items)


def _is_readable() -> bool:
    """Return whether sets of this interpreter have the memory layout of `_Set`."""
    few = {5}
    found = _Set.from_address(id(few))
    return (found.fill, found.used, found.mask) == (1, 1, 7) and HashTable.of(few) == HashTable(8, [5], [], 0)


_IS_READABLE = _is_readable()
