"""Whether a process that was written down lives: seen from its own machine alone; and which are of one world."""

import json
import os
import subprocess
import sys
from unittest import mock

import pytest

from midstride.engine.processes.process_identity import has_ended, local_world_id, process_identity

PROGRAM = """
import json
from midstride.engine.processes.process_identity import process_identity
print(json.dumps(process_identity()), flush=True)
input()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is seen")
def test_a_process_has_ended_if_dead_or_its_id_is_reused() -> None:
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


MPIRUN = "OMPI_COMM_WORLD_RANK"
#: how many shells stand between launcher and rank, the launcher's own variables, and the one that has a rank's number
LAUNCHED = {
    "no shell": (0, {}, MPIRUN),
    "a shell": (1, {}, MPIRUN),
    "two shells": (2, {}, MPIRUN),
    "a shell, in a batch script of Slurm": (1, {"SLURM_PROCID": "0"}, MPIRUN),
    "a shell, torchrun in mpirun": (1, {MPIRUN: "0"}, "RANK"),
}

RANK = """
import os
from midstride.engine.processes.process_identity import local_world_id
os.write(1, f"{local_world_id()}\\n".encode())
"""
LAUNCHER = """
import os, subprocess, sys
_, name, *command = sys.argv
ranks = [subprocess.Popen(command, env={**os.environ, name: str(rank)}) for rank in range(2)]
sys.exit(any([rank.wait() for rank in ranks]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere environments of other processes cannot be read")
@pytest.mark.parametrize("case", LAUNCHED)
def test_each_launcher_has_one_world_id(case: str) -> None:
    shells, outside, name = LAUNCHED[case]
    rank = [sys.executable, "-c", RANK]
    for _ in range(shells):
        rank = ["sh", "-c", '"$@"; exit $?', "sh", *rank]  # a shell that stays between launcher and rank
    command, environment = [sys.executable, "-c", LAUNCHER, name, *rank], {**os.environ, **outside}
    worlds = [subprocess.run(command, env=environment, capture_output=True, text=True, check=True) for _ in range(2)]
    (first, second), (third, fourth) = (world.stdout.split() for world in worlds)
    assert first == second
    assert third == fourth
    assert first != third


@pytest.mark.parametrize("name", ["ADDR", "PORT"])
def test_horovodrun_worlds_differ_by_machine_and_port(name: str) -> None:
    first = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "41"}
    ids = []
    for environment in (first, first, {**first, f"HOROVOD_GLOO_RENDEZVOUS_{name}": "42"}):
        with mock.patch.dict(os.environ, environment):
            ids.append(local_world_id())
    assert ids[0] == ids[1] != ids[2]
