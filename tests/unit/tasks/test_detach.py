"""A flow outlives the reader of what it prints, and leaves Ctrl-C to the process that started it."""

import subprocess
import sys

SCRIPT = """
import os, stat, sys, time
from midstride.tasks.detach import detach
detach()
print("up", flush=True)
while any(stat.S_ISFIFO(os.fstat(number).st_mode) for number in (1, 2)):
    time.sleep(0.01)
for stream in (sys.stdout, sys.stderr):
    print("this is not read", file=stream, flush=True)
"""


def test_output_goes_nowhere_once_its_reader_has_died() -> None:
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"up\n"
        process.stderr.close()
        process.stdout.close()
        assert process.wait() == 0
