"""What an object with a method `reseed(seed)` draws from: whatever that method sets, in it and in what it uses."""

from contextlib import suppress
from typing import Any

from midstride.engine.objects.attributes import attributes_of, delete_attribute, set_attribute
from midstride.engine.objects.containers import MISSING
from midstride.engine.objects.generators import MAIN_GENERATORS, Generator, get_state, set_state, used_by_hook

__all__ = ["ReseedHook", "restorable"]


def restorable(generators: list[Any]) -> list[Any]:
    """Return `generators`, those with a method `reseed(seed)` as what `get_state` and `set_state` take."""
    return [one if isinstance(one, Generator) else ReseedHook(one) for one in generators]


class ReseedHook:
    """An object with a `reseed` method, with the interface of a generator: `getstate` and `setstate`.

    Its state is that of the generators it uses, and the attributes that `reseed` sets.

    Args:
        owner: of the method, which is called once to see what it sets; all is put back.
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
