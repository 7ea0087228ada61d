"""What is said when the user's code has changed since the snapshot: in each of its modules, and in a notebook."""

import importlib
import sys
import types
from pathlib import Path

import pytest

from midstride.engine.checkpointing.identity import source_changes, source_digests

MODEL = "from {other} import loss_of\n\nclass Net:\n    def step(self):\n        return loss_of(1)\n"
LOSS = "def loss_of(x):\n    return x + 1\n"
CELLS = LOSS + "class Base:\n    def step(self):\n        return loss_of(1)\n\nclass Net(Base):\n    pass\n"
REMEDY = "since the snapshot was taken: the run continues with the new code."


def in_files(folder: Path, changed: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Digests of a model and the file it imports, `changed` of which has another comment."""
    for name, source in {"a_model": MODEL.format(other="a_loss"), "a_loss": LOSS}.items():
        (folder / f"{name}.py").write_text(source + ("# edited\n" if name == changed else ""))
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    return source_digests([importlib.import_module("a_model").Net])


@pytest.mark.parametrize(
    ("changed", "said"), [("", []), ("a_model", ["the code of a_model has"]), ("a_loss", ["the code of a_loss has"])]
)
def test_each_module_that_has_changed_is_named(
    changed: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, now = (in_files(tmp_path, which, monkeypatch) for which in ("", changed))
    lines = source_changes(before, now)
    assert [line.split(" changed ")[0] for line in lines] == said
    assert all(REMEDY in line for line in lines)


def typed(source: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Digests of the class `Net` that is typed, with what it needs, where there is no file."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(source, "<cell>", "exec"), vars(main))
    return source_digests([main.Net])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("", "", []),
        (
            "def loss_of",
            "import os\n\n\ndef plot():\n    pass\n\n\ndef loss_of",  # a cell that plots, run in between
            [],
        ),
        ("x + 1", "x + 2", ["the code of loss_of has"]),
        ("loss_of(1)", "loss_of(2)", ["the code of Base has"]),
        ("    pass", "    def end(self):\n        pass", ["the code of Net has"]),
    ],
)
def test_code_of_a_notebook_is_named_by_class_and_function(
    old: str, new: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, now = typed(CELLS, monkeypatch), typed(CELLS.replace(old, new, 1), monkeypatch)
    assert [line.split(" changed ")[0] for line in source_changes(before, now)] == said


def test_modules_that_only_one_attempt_has_are_not_compared() -> None:
    assert source_changes({"a.py": "1"}, {"a.py": "2", "b.py": "3"})[0].startswith("the code of a.py has")
    assert source_changes({"a.py": "1", "b.py": "1"}, {"a.py": "2", "b.py": "3"})[0].startswith(
        "the code of a.py, b.py has"
    )
