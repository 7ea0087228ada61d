"""Whether a process that was written down lives: seen from its own machine alone."""

import json
import subprocess
import sys

import pytest

from midstride.engine.processes.process_identity import has_ended, process_identity

PROGRAM = """
import json
from midstride.engine.processes.process_identity import process_identity
print(json.dumps(process_identity()), flush=True)
input()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is seen")
def test_a_process_has_ended_once_it_is_dead_or_its_number_is_another_s() -> None:
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        identity = json.loads(process.stdout.readline())
        assert identity["pid"] == process.pid
        assert not has_ended(identity)
        assert has_ended({**identity, "began": identity["began"] - 1})
        process.kill()
        process.wait()
    assert has_ended(identity)


@pytest.mark.parametrize("key", ["boot", "namespace"])
def test_of_another_machine_s_process_nothing_is_said(key: str) -> None:
    elsewhere = {**process_identity(), "pid": 1 << 30, key: "another"}
    assert not has_ended(elsewhere)
    assert not has_ended({"host": elsewhere["host"], "pid": 1 << 30}), "as earlier versions wrote it"
