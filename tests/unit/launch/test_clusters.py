"""What a cluster would be asked, and what is said where it is missing; `tests/distributed` has real ones."""

import os
import shlex
import sys
from pathlib import Path
from unittest import mock

import pytest

from midstride.engine.config.nodes import Nodes
from midstride.engine.errors import StrategyUnavailable
from midstride.engine.launch.clusters.base import SECRET, NodeRequest, node_environment
from midstride.engine.launch.clusters.slurm import Slurm

JOIN = (
    "exec srun --ntasks-per-node=1 --cpu-bind=none --mpi=none --kill-on-bad-exit=1 "
    f"{sys.executable} -m midstride.engine join head:1 --wait=30"
)


@pytest.mark.parametrize(
    ("nodes", "url", "arguments", "asked"),
    [
        (
            Nodes(1, 4, lanes=4),
            "/runs/100%/a",
            {"partition": "gpu", "gpus_per_node": 2, "exclusive": True},
            "--nodes=1 --array=0-3 --requeue --signal=TERM@50 --job-name=midstride-a "
            "--output=/runs/100%%/a/slurm-%j.txt --open-mode=append --partition=gpu --gpus-per-node=2 --exclusive",
        ),
        (
            Nodes(4, 4),
            "s3://runs/a",
            {"job-name": "mine", "time": "1-12:00:00"},
            "--nodes=4 --requeue --signal=TERM@50 --job-name=mine --time=1-12:00:00",
        ),
    ],
)
def test_what_slurm_is_asked(nodes: Nodes, url: str, arguments: dict[str, object], asked: str) -> None:
    described = Slurm(NodeRequest("a", url, nodes, arguments, 20.0)).describe("head:1")
    assert shlex.split(described) == ["sbatch", "--parsable", *asked.split(), f"--wrap={JOIN}"]


def test_a_machine_without_slurm_says_what_to_do() -> None:
    missing = pytest.raises(StrategyUnavailable, match=r"world.on is slurm, but there is no sbatch on .*: launch on")
    with mock.patch.dict(os.environ, {"PATH": "/nowhere"}), missing:
        Slurm(NodeRequest("a", "/runs/a", Nodes(2, 2), {}, 20.0)).start("head:1", "5" * 64)


def test_nodes_are_not_told_what_is_for_this_machine_alone() -> None:
    ours = {"MIDSTRIDE_SESSION": "/tmp/a", "OMP_NUM_THREADS": "2", "MIDSTRIDE_GRACE_S": "20", "PYTHONHASHSEED": "0"}
    assert node_environment({**ours, "WANDB_API_KEY": "k"}) == {"WANDB_API_KEY": "k"}


@pytest.mark.parametrize(
    ("export", "becomes"),
    [(None, None), ("ALL", "ALL"), ("NONE", SECRET), ("PATH,HOME", f"PATH,HOME,{SECRET}"), ("ALL,A=b", "ALL,A=b")],
)
def test_slurm_passes_the_secret_by_environment_only(export: str | None, becomes: str | None, tmp_path: Path) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text('#!/bin/sh\nenv > "$0.env"; echo "$@" > "$0.args"; echo 7\n')
    sbatch.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **({"SBATCH_EXPORT": export} if export else {})}
    with mock.patch.dict(os.environ, environment):
        said = Slurm(NodeRequest("a", "/runs/a", Nodes(2, 2), {}, 20.0)).start("head:1", "5" * 64)
    assert said.startswith("Slurm's job 7 will start the nodes")
    variables = dict(line.split("=", 1) for line in (tmp_path / "sbatch.env").read_text().splitlines() if "=" in line)
    assert variables[SECRET] == "5" * 64
    given = variables.get("SBATCH_EXPORT")
    assert given == becomes or {*str(given).split(",")} == {*str(becomes).split(",")}
    assert "5" * 64 not in (tmp_path / "sbatch.args").read_text()
