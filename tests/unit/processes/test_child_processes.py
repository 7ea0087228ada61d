"""Child processes: how each ends, that a signal reaches those that run, and that none lives on."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import pytest

from midstride.engine.processes.child_processes import ChildProcesses, end_within
from midstride.engine.processes.loopback import rank_environments


def returns() -> None:
    pass


def prints() -> None:
    sys.stdout = open(1, "w", buffering=8192, closefd=False)  # noqa: SIM115 - as where the output is a pipe
    print("said", end="")


def leaves(code: object) -> None:
    sys.exit(code)  # type: ignore[arg-type]


def raises() -> None:
    raise ValueError("a bug")


def ends_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleeps() -> None:
    time.sleep(600)


def one() -> list[dict[str, str]]:
    return [dict(os.environ)]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize(
    ("target", "arguments", "code"),
    [
        (returns, [], 0),
        (leaves, [None], 0),
        (leaves, [7], 7),
        (leaves, ["why"], 1),
        (raises, [], 1),
        (ends_itself, [], -signal.SIGKILL),
    ],
)
def test_how_a_process_ends(
    target: Callable[..., None], arguments: list[Any], code: int, method: Literal["fork", "spawn", "forkserver"]
) -> None:
    with ChildProcesses(target, arguments, one(), method) as processes:
        while processes.running():
            processes.wait(60.0)
    assert processes.exit_codes() == [code]


def test_what_a_process_prints_is_flushed(capfd: pytest.CaptureFixture[str]) -> None:
    with ChildProcesses(prints, [], one()) as processes:
        while processes.running():
            processes.wait(60.0)
    assert capfd.readouterr().out == "said"


def test_a_signal_reaches_those_that_run() -> None:
    with ChildProcesses(sleeps, [], one() * 2) as processes:
        processes.send(signal.SIGTERM)
        while processes.running():
            processes.wait(60.0)
    assert processes.exit_codes() == [-signal.SIGTERM] * 2


def test_an_error_in_the_block_ends_them() -> None:
    with pytest.raises(KeyError), ChildProcesses(sleeps, [], one() * 3) as processes:
        raise KeyError
    assert processes.exit_codes() == [-signal.SIGKILL] * 3


def test_a_start_that_fails_ends_those_that_run() -> None:
    processes = ChildProcesses(sleeps, [], one() * 2)
    processes._processes[1].start = raises  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="a bug"), processes:
        pytest.fail("the block was entered")
    assert processes.exit_codes() == [-signal.SIGKILL, None]


STARTER = """
import os
from midstride.engine.processes.child_processes import ChildProcesses
says_its_id = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
with ChildProcesses(exec, [says_its_id], [os.environ], {method!r}) as processes:
    processes.wait(600.0)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_they_end_when_the_process_that_started_them_is_killed(method: str) -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER.format(method=method)], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        child = os.pidfd_open(int(starter.stdout.readline()))
        starter.kill()
        ended, *_ = select.select([child], [], [], 60.0)
        assert ended == [child]
        os.close(child)


@pytest.mark.parametrize(
    ("code", "within_s", "ended"), [("pass", 60.0, True), ("import time; time.sleep(600)", 0, False)]
)
def test_end_within(code: str, within_s: float, ended: bool) -> None:
    process = subprocess.Popen([sys.executable, "-c", code])
    assert end_within(process, within_s) == ended
    assert process.returncode == (0 if ended else -signal.SIGKILL)


def test_the_environment_of_ranks() -> None:
    first, second = rank_environments(2, "/proc/1/fd/3", base={"KEPT": "1"})
    assert first | {"RANK": "1", "LOCAL_RANK": "1"} == second
    expected = {"KEPT": "1", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    assert first == first | expected | {"MIDSTRIDE_MEETING": "/proc/1/fd/3"}
    assert 0 < int(first["MASTER_PORT"]) < 65_536
