"""Loops of accelerate, Fabric and public scripts end as undisturbed, wherever they are killed."""

import csv
import json
from pathlib import Path

import pytest
import torch
from laws.prepared import ROWS, live_all

from midstride.engine.state.differences import differences
from midstride.engine.testing import run_ranks

#: a variable that an iteration changes: timm computes it anew where a pass begins, which nobody can know
NAMED = {"timm": "part of no snapshot: updates in run_epoch."}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all lives; both libraries take seconds to import, and one process does."""
    folder = tmp_path_factory.mktemp("prepared")
    assert run_ranks(live_all, folder) == [0]
    return folder


@pytest.mark.parametrize("name", ROWS)
def test_a_prepared_loop_resumes_exactly(name: str, folder: Path) -> None:
    told = json.loads((folder / f"{name}.json").read_text())
    assert "error" not in told, told["error"]
    ranks = ROWS[name][1]
    first, *died, last = told["codes"]
    assert (first, last) == ([0] * ranks, [0] * ranks)
    assert [codes[-1] for codes in died] == [-9, -9, -9]
    for rank in range(ranks):
        paths = [folder / name / life / f"ended-{rank}.pt" for life in ("undisturbed", "killed")]
        ended = [torch.load(path, weights_only=False) for path in paths]
        assert [one for one in ended[1]["said"] if NAMED.get(name, "nothing") not in one] == []
        assert differences(*ended) == []
    rows = [(folder / name / life / "run/metrics.csv").read_text() for life in ("undisturbed", "killed")]
    assert rows[0] == rows[1]
    if name.startswith("accelerate"):  # 11 batches in windows of 3, the last one of 2
        assert sum(float(row["stepped"]) for row in csv.DictReader(rows[0].splitlines())) == 2 * 4
