"""A model, data and collator of Hugging Face's resume bit for bit, wherever they are killed."""

import json
from pathlib import Path

import pytest
from laws.huggingface import DEATHS, ROWS, live_all
from laws.lives import assert_runs_alike

from midstride.engine.testing import run_ranks

#: the first test waits for the lives of all


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all lives; transformers takes seconds to import, and one process does."""
    folder = tmp_path_factory.mktemp("huggingface")
    assert run_ranks(live_all, folder) == [0]
    return folder


@pytest.mark.parametrize("name", ROWS)
def test_a_model_of_transformers_resumes_exactly(name: str, folder: Path) -> None:
    told = json.loads((folder / f"{name}.json").read_text())
    assert "error" not in told, told["error"]
    ended, *died, finished = told["codes"]
    assert (ended, finished) == (0, 0)
    assert len(died) == len(DEATHS)
    assert 0 not in died
    assert_runs_alike(str(folder / name / "run"), str(folder / name / "undisturbed"), ["last"])
