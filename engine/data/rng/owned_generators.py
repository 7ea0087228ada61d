"""The generators that a data set or a collate_fn holds itself, and what seeds them."""

from collections.abc import Callable
from typing import Any

from midstride.engine.objects.generators import find_generators, seeder
from midstride.engine.objects.reseed_hook import restorable

__all__ = ["OwnedGenerators", "Seeders"]

Seeders = list[Callable[[int], object]]


class OwnedGenerators:
    """The seeders of what one object holds, found where it is read: in a worker that is a copy."""

    def __init__(self) -> None:
        self.seeders: Seeders | None = None
        self._found: list[Any] = []
        self._restorable: list[Any] | None = None
        self._settled = False

    def of(self, owner: object) -> Seeders:
        """Return the seeders of `owner`, which is the same at each call."""
        if self.seeders is None:
            self._found = [generator for _, generator in sorted(find_generators(owner).items())]
            self.seeders, self._restorable = [*map(seeder, self._found)], None
        return self.seeders

    def generators_of(self, owner: object) -> list[Any]:
        """Return its generators, as far as their states can be taken and put back."""
        self.of(owner)
        if self._restorable is None:
            self._restorable = restorable(self._found)
        return self._restorable

    def grew(self, owner: object) -> bool:
        """Look once more, after the first reading; return whether there is more now."""
        if self._settled:
            return False
        before, self.seeders, self._settled = self.seeders, None, True
        return len(self.of(owner)) > len(before or ())

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing that was found."""
        return {
            "seeders": None,
            "_found": [],
            "_restorable": None,
            "_settled": False,
        }  # found anew where a worker is spawned
