"""Loaders of every family, killed within a pass on one rank or on two, give what they give undisturbed."""

import json
from itertools import cycle, product
from pathlib import Path

import pytest
from laws.families import DEATHS, ROWS, live_all

from midstride.engine.testing import run_ranks

LIVES = ("killed", "undisturbed")


def cells(config: pytest.Config) -> list[tuple[str, int]]:
    """Return rows with numbers of ranks: in turn, or all of them."""
    return [*(product(ROWS, DEATHS) if config.getoption("--laws") == "all" else zip(ROWS, cycle(DEATHS), strict=False))]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize(("name", "ranks"), cells(metafunc.config))


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """Return the folder of the lives of all cells."""
    folder: Path = tmp_path_factory.mktemp("families")
    assert run_ranks(live_all, folder, cells(pytestconfig), timeout_s=600.0) == [0]
    return folder


def test_a_loader_of_each_family_continues_within_its_passes(name: str, ranks: int, lives: Path) -> None:
    if not (told := lives / f"{name} {ranks}.json").exists():
        pytest.skip("its library is not installed")
    found = json.loads(told.read_text())
    assert "error" not in found, found["error"]
    undisturbed, killed, resumed = found["codes"]
    assert undisturbed == resumed == [0] * ranks
    assert -9 in killed
    for rank in range(ranks):
        seen, expected = ((lives / f"{name} {ranks}" / f"{life}/{rank}.json").read_text() for life in LIVES)
        assert seen == expected
        assert len(json.loads(seen)) > DEATHS[ranks][0]
