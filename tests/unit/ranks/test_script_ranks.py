"""The other ranks of a plain script: one that dies is heard, also where the wait for it would never end."""

import subprocess
import sys

SCRIPT = """
import os, subprocess, sys, threading
from midstride.engine.ranks import script_ranks as script

ends = "import os; os.kill(os.getpid(), 9)" if sys.argv[1] == "killed" else ""
script._processes[1] = subprocess.Popen([sys.executable, "-c", ends])
script._processes[1].wait()
with script.ranks_watched(0.1):
    if sys.argv[1] == "killed":
        threading.Event().wait()  # as over NCCL
print("went on")
"""


def test_rank_0_ends_when_it_waits_for_a_killed_rank() -> None:
    found = subprocess.run([sys.executable, "-c", SCRIPT, "killed"], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (1, "")
    assert "rank 1 had ended with code -9 (SIGKILL)" in found.stderr
    assert "0.1 s (collective_timeout_s)" in found.stderr
    assert "start the same run again to resume" in found.stderr


def test_rank_0_goes_on_when_another_is_done() -> None:
    found = subprocess.run([sys.executable, "-c", SCRIPT, "done"], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (0, "went on\n", "")
