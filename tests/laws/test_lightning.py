"""A LightningModule trains unchanged: the bits of Lightning's own Trainer, and exact resume, where that has none."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from laws.lightning.lives import DEATHS, live_all, train_on_two
from laws.lightning.own_loader import gathered, read_on, windows
from laws.lives import assert_runs_alike

from midstride.engine.runs.audit import audit
from midstride.engine.testing import run_ranks

#: the rows of the table, read as text: Lightning takes seconds to import, and is imported in forks alone
TABLE = ast.parse(Path(__file__).with_name("lightning").joinpath("table.py").read_text()).body[-1]
NAMES = [ast.literal_eval(name) for name in TABLE.value.keys]

#: the first test waits for the lives of all


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the folder of all lives, and what came of each module."""
    folder = tmp_path_factory.mktemp("lightning")
    assert run_ranks(live_all, folder) == [0]
    return folder, {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.mark.parametrize("name", NAMES)
def test_a_lightning_module_trains_as_it_is(name: str, told: tuple[Path, dict[str, Any]]) -> None:
    folder, found = told
    assert "error" not in found[name], found[name]["error"]
    assert bool(found[name]["differing"]) == found[name]["draws"], found[name]["differing"]
    assert found[name]["codes"] == [-9] * len(DEATHS) + [0]
    assert_runs_alike(str(folder / name / "run"), str(folder / name / "undisturbed"), ["last"])


def test_two_ranks_train_it_too(tmp_path: Path) -> None:
    assert run_ranks(train_on_two, str(tmp_path / "run"), processes=2) == [0, 0]
    assert audit(str(tmp_path / "run")).is_clean


@pytest.mark.parametrize(("by", "ranks"), [("lightning", 1), ("accelerate", 2)])
def test_foreign_loops_resume_exactly_with_our_loader_only(by: str, ranks: int, tmp_path: Path) -> None:
    assert run_ranks(read_on, by, tmp_path, processes=ranks) == [0] * ranks
    for rank in range(ranks):
        assert json.loads((tmp_path / f"alike-{rank}.json").read_text()) == {"stateful": True, "plain": False}


def test_accelerate_steps_on_an_incomplete_last_window(tmp_path: Path) -> None:
    assert run_ranks(windows, tmp_path, processes=1) == [0]
    found = json.loads((tmp_path / "windows.json").read_text())
    assert found["stateful"] == found["plain"]
    assert found["plain"][0].count(True) == 8


#: ranks -> samples, batch size and how many samples are counted twice
GATHERED = {
    1: [(7, 4, 0)],
    2: [(11, 4, 0), (12, 4, 0)],
    3: [(13, 4, 0), (14, 4, 0), (4, 1, 0), (13, 5, 2), (10, 3, 0)],
}


@pytest.mark.parametrize("ranks", GATHERED)
def test_accelerate_gathers_each_sample_once_or_says_so(ranks: int, tmp_path: Path) -> None:
    cases = GATHERED[ranks]
    assert run_ranks(gathered, [case[:2] for case in cases], tmp_path, processes=ranks) == [0] * ranks
    told = json.loads((tmp_path / "gathered-0.json").read_text())
    for (samples, _, twice), found in zip(cases, told, strict=True):
        assert found["plain"] == [*range(samples)]
        assert found["stateful"] == sorted([*range(samples), *range(twice)])
        assert [f"counts {twice} samples twice" in warned for warned in found["warned"]] == [True] * bool(twice)
