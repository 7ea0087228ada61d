"""The table of planted bugs keeps up with the code: every bug can still be planted, and its tests are still there."""

from pathlib import Path

import pytest
from mutants.mutant import Mutant
from mutants.table import MUTANTS

ROOT = Path(__file__).parents[2]
PACKAGES = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "engine").glob("*/__init__.py")} | {
    "tasks",
    "flows",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.name}")
def test_a_bug_can_be_planted_and_has_tests_to_see_it(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text()
    planted = mutant.planted(source)
    assert planted != source
    compile(planted, mutant.file, "exec")
    for argument in mutant.arguments:
        file, _, test = argument.partition("::")
        assert f"def {test.partition('[')[0]}" in (ROOT / file).read_text()


def test_every_package_has_its_bugs() -> None:
    assert len(MUTANTS) >= 60
    assert len({(mutant.file, mutant.name) for mutant in MUTANTS}) == len(MUTANTS)
    assert {"/".join(Path(mutant.file).parent.parts[:2]) for mutant in MUTANTS} >= PACKAGES
