"""Modules of libraries train to Lightning's own bits, and resume exactly: `make test-libraries`."""

import ast
import importlib
import json
import os
import traceback
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from laws.lightning.lives import DEATHS, lives_of
from laws.lives import assert_runs_alike

from midstride.engine.testing import run_ranks

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="libraries are not installed: make test-libraries")

#: files with a table of rows, read as text: the libraries take long to import, and are imported in forks alone
FILES = ("adapters", "optimizers", "models", "applications", "loaders")
TABLES: Any = {file: ast.parse(Path(__file__).with_name(f"{file}.py").read_text()).body[-1] for file in FILES}
ROWS = [(file, ast.literal_eval(name)) for file in FILES for name in TABLES[file].value.keys]


@pytest.fixture(scope="module", autouse=True)
def _fork_server(lasting: set[int]) -> None:
    """Have the server from which rows are forked outlast the test that starts it."""
    run_ranks(print)
    lasting |= {int(one) for one in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Return a function to the folder of a file's rows, once those that are asked for have lived."""
    chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]

    @cache
    def folder(file: str) -> Path:
        names = [one["name"] for one in chosen if one.get("file") == file]
        found: Path = tmp_path_factory.mktemp(file)
        assert run_ranks(live_all, file, names, found, timeout_s=3600.0) == [0]
        return found

    return folder


@pytest.mark.parametrize(("file", "name"), ROWS)
def test_a_program_of_a_library_trains_as_it_is(file: str, name: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(file)
    found = json.loads((folder / f"{name}.json").read_text())
    assert "error" not in found, found["error"]
    assert bool(found["differing"]) == found["draws"], found["differing"]
    assert found["codes"] == [-9] * len(DEATHS) + [0]
    assert_runs_alike(str(folder / name / "run"), str(folder / name / "undisturbed"), ["last"])


def live_all(file: str, names: list[str], folder: Path) -> None:
    """Give the named rows of a file their lives, in a fork; what came of each goes to a file of its name."""
    warnings.simplefilter("ignore")
    importlib.import_module("libraries.rows")  # first: it gets torchvision to import
    rows = importlib.import_module(f"libraries.{file}").ROWS
    for name in names:
        found: dict[str, Any] = {}
        try:
            found = lives_of(rows[name], folder / name)
        except BaseException:
            found["error"] = traceback.format_exc()
        (folder / f"{name}.json").write_text(json.dumps(found))
