"""Tests of what is told of functions of libraries that user code names."""

import sys
import types
from pathlib import Path

import pytest
import torch

from midstride.engine.objects.roots import process_state

#: as code names it -> the library it stands in, and its name there
FUNCTIONS = {
    "F.relu": (torch.nn.functional, "relu"),
    "torch.nn.functional.elu": (torch.nn.functional, "elu"),
    "torch.sigmoid": (torch, "sigmoid"),  # written in C
}


@pytest.fixture
def kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type:
    """A class of a file of the user's that names them all, and what is no function of a library."""
    path = tmp_path / "named_here.py"
    calls = "\n".join(f"    {name}(x)" for name in FUNCTIONS)
    source = f"import torch\nimport torch.nn.functional as F\n\n\nclass Net:\n    x = 1\n\n\ndef f(x):\n{calls}\n"
    path.write_text(f"{source}    torch.nn.Linear.forward, torch.nothing.relu, Net.x\n")
    module = types.ModuleType("named_here")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "named_here", module)
    exec(compile(path.read_text(), str(path), "exec"), vars(module))
    return module.Net


def told(kind: type) -> dict[str, object]:
    return {name: value for name, value in process_state([kind]) if name.startswith("library function ")}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_code_names_and_replaces_is_told(
    name: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, function = FUNCTIONS[name]
    before = told(kind)
    monkeypatch.setattr(library, function, lambda x: x)
    now = told(kind)

    assert len(before) == len(now) == len(FUNCTIONS)
    assert [one for one in now if now[one] != before[one]] == [f"library function {library.__name__}.{function}"]
