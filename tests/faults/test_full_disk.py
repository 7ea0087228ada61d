"""A full disk ends `fit` with one clear message, not with a traceback."""

import functools
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

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
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        preexec_fn=functools.partial(_small_files_only, 4096),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "was not taken, rank 0 says: OSError: [Errno" in ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
