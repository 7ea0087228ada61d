"""The generators that a data set or a collate_fn holds, and their seeders."""

from collections.abc import Callable
from typing import Any

from midstride.engine.objects.generator_search import find_generators, restorable
from midstride.engine.objects.kinds.generators import seeder

__all__ = ["OwnedGenerators", "Seeders"]

Seeders = list[Callable[[int], object]]


class OwnedGenerators:
    """The seeders of the generators of one object, found in the process that reads it."""

    def __init__(self) -> None:
        self.seeders: Seeders | None = None
        self._found: list[Any] = []
        self._restorable: list[Any] | None = None
        self._settled = False

    def of(self, owner: object) -> Seeders:
        """Return the seeders of `owner`, which must be the same object at each call."""
        if self.seeders is None:
            self._found = [generator for _, generator in sorted(find_generators(owner).items())]
            self.seeders, self._restorable = [*map(seeder, self._found)], None
        return self.seeders

    def generators_of(self, owner: object) -> list[Any]:
        """Return its generators whose states can be saved and restored."""
        self.of(owner)
        if self._restorable is None:
            self._restorable = restorable(self._found)
        return self._restorable

    def has_grown(self, owner: object) -> bool:
        """Search again after the first reading, once; return whether there are more generators."""
        if self._settled:
            return False
        before, self.seeders, self._settled = self.seeders, None, True
        return len(self.of(owner)) > len(before or ())

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without generators, which a spawned worker finds again."""
        return {
            "seeders": None,
            "_found": [],
            "_restorable": None,
            "_settled": False,
        }  # found anew where a worker is spawned
