"""A planted bug: one text of a file replaced by another, and the tests that must see it."""

from dataclasses import dataclass

__all__ = ["Mutant"]


@dataclass(frozen=True)
class Mutant:
    """One row of the table.

    Args:
        name: what goes wrong.
        file: where, relative to the root of the checkout.
        old: the text that is replaced; it stands there once.
        new: the text in its place.
        tests: the tests that must fail, a line each, as pytest names them; relative to the folder of tests.
        survives: why no test can fail, where none can.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    survives: str = ""

    @property
    def arguments(self) -> list[str]:
        """What pytest is given."""
        return [f"tests/{line.strip()}" for line in self.tests.splitlines()]

    def planted(self, source: str) -> str:
        """Return `source`, the text of the file, with the bug in it.

        Raises:
            ValueError: the old text does not stand there exactly once.
        """
        if (found := source.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.old!r} stands {found} times in {self.file}, not once")
        return source.replace(self.old, self.new)
