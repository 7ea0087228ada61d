"""A planted bug: a piece of code in a function, its replacement, and the tests that must fail."""

import ast
import re
from collections import defaultdict
from pathlib import Path

from mutants.patterns import definitions, replaced


class Mutant:
    """One row of the table.

    Args:
        name: what goes wrong.
        where: the function, class or variable that holds the code, by its qualified name: `Class.method`. Several may
            have this name as long as one of them has the code.
        old: the code, an expression or statements, compared as a syntax tree. `...` matches anything.
        new: the code in its place (see `mutants.patterns.replaced`).
        tests: the tests that must fail: `test_name`, `test_name[parameters]`, or all of `test_file.py`. The end of a
            path may come before it, where several have the name: `training/test_file.py::test_name`.
        survives: why no test can fail, where none can.
    """

    def __init__(self, name: str, where: str, old: str, new: str, *tests: str, survives: str = "") -> None:
        self.name, self.where, self.old, self.new, self.tests, self.survives = name, where, old, new, tests, survives

    def __str__(self) -> str:
        return f"{self.where}: {self.name}"


class Checkout:
    """The files of a checkout, found by the names of their functions and tests.

    Args:
        root: of the checkout.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._sources: defaultdict[str, set[Path]] = defaultdict(set)
        self._tests: defaultdict[str, set[str]] = defaultdict(set)
        for file in (file for package in ("engine", "tasks", "flows") for file in (root / package).rglob("*.py")):
            for name, _ in definitions(ast.parse(file.read_text())):
                self._sources[name].add(file)
        for file in sorted((root / "tests").rglob("test_*.py")):
            path = file.relative_to(root).as_posix()
            self._tests[file.name].add(path)
            for name in re.findall(r"^(?:    )?def (test_\w+)", file.read_text(), re.MULTILINE):
                self._tests[name].add(path)

    def files(self, mutant: Mutant) -> list[str]:
        """Return the files that define the function of a bug, relative to the root."""
        return sorted(file.relative_to(self.root).as_posix() for file in self._sources[mutant.where])

    def planted(self, mutant: Mutant) -> tuple[Path, ast.Module]:
        """Return the file of a bug and its tree with the bug in it.

        Raises:
            ValueError: the old code does not stand there exactly once.
        """
        if not (files := self._sources[mutant.where]):
            raise ValueError(f"{mutant}: no function, class or variable has this name")
        trees = {file: ast.parse(file.read_text()) for file in sorted(files)}
        found = {file: [at for name, at in definitions(tree) if name == mutant.where] for file, tree in trees.items()}
        counts = {file: replaced(at, mutant.old, mutant.new) for file, at in found.items()}
        if sum(counts.values()) != 1:
            seen = ", ".join(f"{count} times in {file.relative_to(self.root)}" for file, count in counts.items())
            raise ValueError(f"{mutant}: {mutant.old!r} must stand there once, and stands {seen}")
        file = next(file for file, count in counts.items() if count)
        return file, ast.fix_missing_locations(trees[file])

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests of a row as pytest names them.

        Raises:
            ValueError: there is no test of this name, or several.
        """
        return [self._test(mutant, test) for test in mutant.tests]

    def _test(self, mutant: Mutant, test: str) -> str:
        name, bracket, parameters = test.partition("[")
        path, function = name.split("::") if "::" in name else (name, "") if name.endswith(".py") else ("", name)
        known = self._tests[function or path.rpartition("/")[2]]
        files = [file for file in known if f"/{file}".endswith(f"/{path}" if path else "")]
        if len(files) != 1:
            raise ValueError(f"{mutant}: {test} stands in {', '.join(files) or 'no file'}")
        return f"{files[0]}::{function}{bracket}{parameters}" if function else files[0]
