"""Saves and restores the state that a user's method `reseed(seed)` sets: attributes and generators."""

from contextlib import suppress
from typing import Any

from midstride.engine.objects.attributes import attributes_of, delete_attribute, set_attribute
from midstride.engine.objects.containers import MISSING
from midstride.engine.objects.generator_search import MAIN_GENERATORS, Generator, get_state, set_state, used_by_hook

__all__ = ["ReseedHook", "restorable"]


def restorable(generators: list[Any]) -> list[Any]:
    """Return `generators` with objects that have a method `reseed(seed)` wrapped in `ReseedHook`."""
    return [one if isinstance(one, Generator) else ReseedHook(one) for one in generators]


class ReseedHook:
    """Wraps an object with a method `reseed(seed)` as a generator: `getstate` and `setstate`.

    The state consists of the states of the generators that it uses, and the attributes that `reseed` sets.

    Args:
        owner: the object; its `reseed` is called once to find what it sets, and the changes are reverted.
    """

    def __init__(self, owner: Any) -> None:
        used = [owner, *used_by_hook(owner)]
        self._generators = [value for value in used if isinstance(value, Generator)]
        self._attributes: list[tuple[Any, str]] = []
        holders = [value for value in used if not isinstance(value, Generator)]
        moved = [*MAIN_GENERATORS, *self._generators]
        states, before = [*map(get_state, moved)], [*map(attributes_of, holders)]
        with suppress(Exception):  # reading calls it, and says where it failed
            owner.reseed(0)
        for holder, own in zip(holders, before, strict=True):
            for name, value in attributes_of(holder).items():
                if value is not own.get(name, MISSING):
                    self._attributes.append((holder, name))
                    _set(holder, name, own.get(name, MISSING))
        for generator, state in zip(moved, states, strict=True):
            set_state(generator, state)

    def getstate(self) -> tuple[list[Any], list[Any]]:
        """Return the values of the attributes, uncopied, and the states of the generators."""
        values = [attributes_of(holder).get(name, MISSING) for holder, name in self._attributes]
        return values, [*map(get_state, self._generators)]

    def setstate(self, state: tuple[list[Any], list[Any]]) -> None:
        """Set attributes and generators to what `getstate` returned."""
        for (holder, name), value in zip(self._attributes, state[0], strict=True):
            _set(holder, name, value)
        for generator, own in zip(self._generators, state[1], strict=True):
            set_state(generator, own)


def _set(holder: Any, name: str, value: Any) -> None:
    if value is not MISSING:
        set_attribute(holder, name, value)
    elif name in attributes_of(holder):
        delete_attribute(holder, name)
