"""A full disk ends `fit` with one clear message, not with a traceback."""

import functools
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from laws.lives import assert_runs_alike
from support.flow_runs import train_forked

from midstride.engine.config.job import TrainingJob

JOB = """\
name: full
module: laws.lives:Tangled
data: laws.lives:SampleData
data_args: {ranks: 1, workers: 0}
trainer: {max_epochs: 1}
snapshots: {url: store, every_steps: 2}
"""


def _small_files_only(largest_bytes: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_bytes, largest_bytes))


def test_a_disk_that_takes_no_snapshot_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    ended = subprocess.run(
        [sys.executable, "-m", "midstride.engine", "fit", "job.yaml", "--run", "one"],
        cwd=tmp_path,
        # What Python compiles would be cut off, too, and every later import of it fail.
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=functools.partial(_small_files_only, 4096),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert re.search(r"was not taken, rank 0 says: .*/one cannot be written: \[Errno \d+\] ", ended.stderr)
    assert ended.stderr.count("Raise the limit on the size of a file (ulimit -f)") == 1
    assert "Traceback" not in ended.stdout + ended.stderr


#: a full disk of its own; what the run has left there is kept where there is room
STORY = """\
mount -t tmpfs -o size=2m tmpfs store && head -c {ballast_bytes} /dev/zero > store/ballast
"$0" -m midstride.engine fit job.yaml --run one 2> first.txt
echo $? > first.code
cp -a store/one kept
"""


def in_folder(folder: Path, *command: str) -> int:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False).returncode


can_mount = pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode != 0,
    reason="no disk can be mounted here",
)


@can_mount
@pytest.mark.parametrize("room_bytes", [4_096, 8_192])
def test_a_full_folder_of_temporary_files_is_named(room_bytes: int, tmp_path: Path) -> None:
    """The run itself lies elsewhere: ranks that cannot say how they ended were not killed."""
    (tmp_path / "job.yaml").write_text(JOB.replace("url: store", "url: runs"))
    (tmp_path / "store").mkdir()
    story = f'export TMPDIR="$PWD/store"\n{STORY.format(ballast_bytes=2 * 2**20 - room_bytes)}'
    in_folder(tmp_path, "unshare", "-rm", "sh", "-c", story, sys.executable)
    assert (tmp_path / "first.code").read_text() == "1\n"
    told = (tmp_path / "first.txt").read_text()
    assert f"No space is left in {tmp_path}/store, where ranks write how they end" in told
    assert "Traceback" not in told


@can_mount
@pytest.mark.parametrize("room_bytes", [4_096, 60_000, 200_000])
def test_a_run_on_a_full_disk_goes_on_when_there_is_room(room_bytes: int, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    story = STORY.format(ballast_bytes=2 * 2**20 - room_bytes)
    (tmp_path / "store").mkdir()
    assert in_folder(tmp_path, "unshare", "-rm", "sh", "-c", story, sys.executable) == 0
    assert (tmp_path / "first.code").read_text() == "1\n"
    said = (tmp_path / "first.txt").read_text()
    assert "No space left on device. Free some space: the same command then resumes the run." in said
    assert "Traceback" not in said
    (tmp_path / "kept").rename(tmp_path / "store" / "one")
    job = TrainingJob.load(tmp_path / "job.yaml")
    for run in ("one", "whole"):
        train_forked(job, run)
    assert_runs_alike(job.run_url("one"), job.run_url("whole"), ["last"])
