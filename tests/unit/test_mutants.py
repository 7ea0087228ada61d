"""The table of planted bugs fits the code: each bug can be planted, and its tests exist."""

import ast
from pathlib import Path

import pytest
from mutants.mutant import Checkout, Mutant
from mutants.patterns import definitions, replaced
from mutants.table import MUTANTS

ROOT = Path(__file__).parents[2]
CHECKOUT = Checkout(ROOT)
PACKAGES = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "engine").glob("*/__init__.py")} | {
    "tasks",
    "flows",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_bug_can_be_planted_and_has_tests(mutant: Mutant) -> None:
    file, planted = CHECKOUT.planted(mutant)
    compile(planted, file, "exec")
    assert ast.dump(ast.parse(mutant.old)) != ast.dump(ast.parse(mutant.new))
    assert CHECKOUT.tests_of(mutant)


def test_every_package_has_bugs() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    files = [CHECKOUT.planted(mutant)[0].relative_to(ROOT) for mutant in MUTANTS]
    assert {"/".join(file.parent.parts[:2]) for file in files} >= PACKAGES


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        pytest.param("x > 1", "False", "if False:\n    f(x, 1, key='a')", id="an expression"),
        pytest.param("f(x, ..., **...)", "g(..., **...)", "if x > 1:\n    g(1, key='a')", id="arguments"),
        pytest.param("if x > 1: ...", "while x: ...", "while x:\n    f(x, 1, key='a')", id="a block"),
        pytest.param("f(...)", "g(...)", None, id="keywords that are not named"),
        pytest.param("x", "y", None, id="two matches"),
    ],
)
def test_code_is_replaced_by_its_pattern(old: str, new: str, code: str | None) -> None:
    tree = ast.parse("def work(x):\n    if x > 1:\n        f(x, 1, key='a')  # why\n")
    found = [at for name, at in definitions(tree) if name == "work"]
    assert (replaced(found, old, new) == 1) == (code is not None)
    if code is not None:
        assert ast.unparse(tree) == "def work(x):\n" + "\n".join(f"    {line}" for line in code.splitlines())


def test_a_bug_names_what_it_does_not_find() -> None:
    with pytest.raises(ValueError, match=r"^nowhere: lost: no function, class or variable has this name$"):
        CHECKOUT.planted(Mutant("lost", "nowhere", "x", "y"))
    with pytest.raises(ValueError, match=r"'nothing' must stand there once, and stands 0 times in engine/.*\.py$"):
        CHECKOUT.planted(Mutant("lost", "Trainer.fit", "nothing", "y"))
    with pytest.raises(ValueError, match=r"stands in no file$"):
        CHECKOUT.tests_of(Mutant("lost", "Trainer.fit", "x", "y", "test_nothing"))
