"""A `Resumable` Trainer has the bits of `transformers.Trainer`, wherever it is killed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from laws.resumable import ROWS, live_all

from midstride.engine.state.differences import differences
from midstride.engine.testing import run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all lives; transformers takes seconds to import, and one process does."""
    folder = tmp_path_factory.mktemp("resumable")
    assert run_ranks(live_all, folder) == [0]
    return folder


@pytest.mark.parametrize("name", ROWS)
def test_a_trainer_of_transformers_resumes_exactly(name: str, folder: Path) -> None:
    told = json.loads((folder / f"{name}.json").read_text())
    assert "error" not in told, told["error"]
    ranks = ROWS[name][0]
    assert [codes[-1] for codes in told["codes"]] == [0, 0, -9, -9, 0, 0]
    for rank in range(ranks):
        plain, undisturbed, killed = (ended(folder / name / life, rank) for life in ("plain", "undisturbed", "killed"))
        assert undisturbed["own"][0] == len(undisturbed["own"][1]) > 4
        assert differences({**plain, "own": undisturbed["own"]}, undisturbed) == []
        assert differences(undisturbed, killed) == []
    rows = [(folder / name / life / "run/metrics.csv").read_text() for life in ("undisturbed", "killed")]
    assert rows[0] == rows[1]
    assert len(rows[0].splitlines()) > 5


def ended(folder: Path, rank: int) -> Any:
    return torch.load(folder / f"ended-{rank}.pt", weights_only=False)
