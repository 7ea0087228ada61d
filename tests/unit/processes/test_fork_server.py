"""What a fork server forks is as what a fresh Python is: found, ended, told alike. It ends with its launcher."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.limit import LIMIT_S

from midstride.engine.processes import fork_server
from midstride.engine.processes.fork_server import ForkServer, forking, running_server
from midstride.engine.processes.lifetime import SESSION, processes_with_env
from midstride.engine.processes.supervised_process import SupervisedProcess

#: imported by the server, before it is called in a fork
PROGRAM = """
import atexit, os, signal, sys, threading, time
from pathlib import Path

imported_by = os.getpid()

def stop(number, frame):
    print("asked to stop", flush=True)
    sys.exit(75)

def wait():
    signal.signal(signal.SIGTERM, stop)
    print("waits", flush=True)
    while True:
        time.sleep(0.01)

def main():
    atexit.register(print, "exit function")
    print("forked", os.getpid() != imported_by, "in", Path.cwd().name, "with", os.environ.get("SEEN"), *sys.argv[1:])
    if sys.argv[1] == "wait":
        wait()
    threading.Thread(target=lambda: (time.sleep(0.05), print("its thread"))).start()
    if sys.argv[1] == "raise":
        raise ValueError("in the program")
    sys.exit(int(sys.argv[1]))
"""

COMMAND = (sys.executable, "-m", "program")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "program.py").write_text(PROGRAM)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def server(environment: dict[str, str]) -> Iterator[ForkServer]:
    with forking(environment, "program"):
        found = running_server(environment)
        assert found is not None
        yield found
    assert running_server(environment) is None


def test_blocks_in_several_threads_share_a_server(server: ForkServer, environment: dict[str, str]) -> None:
    entered, leave = threading.Event(), threading.Event()

    def block() -> None:
        with forking(environment, "program"):
            entered.set()
            leave.wait()

    with forking(environment, "program"):
        other = threading.Thread(target=block)
        other.start()
        entered.wait()
        assert running_server(environment) is server
    assert not server.has_gone(), "another block uses it"
    leave.set()
    other.join()
    assert not server.has_gone()


def supervised(environment: dict[str, str], folder: Path, *arguments: str, **more: str) -> SupervisedProcess:
    marked = {**environment, SESSION: str(folder / "session"), "SEEN": "42", **more}
    return SupervisedProcess([*COMMAND, *arguments], environment=marked, log=folder / "log.txt", grace_s=LIMIT_S)


def until_said(log: Path, words: str) -> None:
    while words not in (log.read_text() if log.exists() else ""):
        time.sleep(0.01)


def shown(pid: int) -> list[str]:
    """The command line that `ps` shows of a process."""
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")


#: argument of the program -> its exit code, and the end of what it says
ENDS = {
    "0": (0, "its thread\nexit function\n"),
    "3": (3, "its thread\nexit function\n"),
    "raise": (1, "exit function\n"),
}


@pytest.mark.parametrize("argument", ENDS)
def test_an_imported_program_runs_and_ends_in_a_fork(
    argument: str, server: ForkServer, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with supervised(environment, tmp_path, argument) as group:
        code = group.wait(LIMIT_S)
    said = (tmp_path / "log.txt").read_text()
    assert said.startswith(f"forked True in {tmp_path.name} with 42 {argument}\n")
    assert said.endswith(ENDS[argument][1])
    assert ("ValueError: in the program" in said) == (argument == "raise")
    assert code == ENDS[argument][0]


def test_its_processes_have_their_mark_and_end_on_request(
    server: ForkServer, environment: dict[str, str], tmp_path: Path
) -> None:
    with supervised(environment, tmp_path, "wait") as group:
        until_said(tmp_path / "log.txt", "waits")
        assert group.wait(0.0) is None
        assert len(processes_with_env(SESSION, str(tmp_path / "session"))) == 2
        [program] = {*processes_with_env(SESSION, str(tmp_path / "session"))} - {group.pid}
        assert shown(program) == [*COMMAND, "wait"]
        assert shown(group.pid)[1:3] == ["-m", "midstride.engine.processes.supervisor"]
    assert group.poll() == 75
    assert (tmp_path / "log.txt").read_text().endswith("asked to stop\nexit function\n")
    assert processes_with_env(SESSION, str(tmp_path / "session")) == []


def test_any_other_command_is_run_as_it_is(server: ForkServer, environment: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('program' in sys.modules); sys.exit(4)"]
    log = tmp_path / "log.txt"
    with SupervisedProcess(command, environment=environment, log=log, grace_s=1.0) as group:
        code = group.wait(LIMIT_S)
    assert (code, log.read_text()) == (4, "False\n")


def test_a_killed_server_stops_its_worlds_and_is_replaced(
    server: ForkServer, environment: dict[str, str], tmp_path: Path
) -> None:
    with supervised(environment, tmp_path, "wait") as group:
        until_said(tmp_path / "log.txt", "waits")
        os.kill(server._process.pid, signal.SIGKILL)
        code = group.wait(LIMIT_S)
    assert code == 128 + signal.SIGTERM
    assert "asked to stop" in (tmp_path / "log.txt").read_text()
    (tmp_path / "next").mkdir()
    with supervised(environment, tmp_path / "next", "3") as group:
        assert isinstance(group._supervisor, subprocess.Popen)


def test_a_signal_while_it_still_imports_leaves_nothing_behind(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\n")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with forking(environment, "slow"):
        server = running_server(environment)
        assert server is not None
        monkeypatch.setattr(server, "_receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            supervised(environment, tmp_path, "0")
        assert server.has_gone()


#: variable that differs -> whether a fork is as a process that starts with it
DIFFERENT = {"PYTHONHASHSEED": False, "OMP_PROC_BIND": False, "OMP_NUM_THREADS": True, "SEEN": True}


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_files_at_the_start_mean_no_fork(name: str, server: ForkServer, environment: dict[str, str]) -> None:
    assert (running_server({**environment, name: "7"}) is server) == DIFFERENT[name]


def test_a_long_request_or_failed_import_means_a_new_process(
    server: ForkServer, environment: dict[str, str], tmp_path: Path
) -> None:
    long = {**environment, "LONG": "x" * 90_000, "LONGER": "x" * 90_000}
    assert server.start_supervisor(COMMAND, long, tmp_path / "log.txt", 1.0) is None
    with forking(environment, "not_there"):
        *_, broken = fork_server._servers
        assert broken.start_supervisor(COMMAND, environment, tmp_path / "log.txt", 1.0) is None


#: a launcher that dies
LAUNCHER = """
import os, sys, time
from pathlib import Path
from midstride.engine.processes import fork_server
from midstride.engine.processes.fork_server import forking
from midstride.engine.processes.supervised_process import SupervisedProcess
log = Path(sys.argv[1])
environment, command = dict(os.environ), [sys.executable, "-m", "program", "wait"]
with forking(environment, "program"):
    world = SupervisedProcess(command, environment=environment, log=log, grace_s=600.0)
    while "waits" not in log.read_text():
        time.sleep(0.01)
    os._exit(9)
"""


def test_a_server_that_is_stopped_alone_is_resumed(
    server: ForkServer, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "_STOPPED_S", 0.05)
    number = server._process.pid
    os.kill(number, signal.SIGSTOP)
    with supervised(environment, tmp_path, "wait") as group:
        until_said(tmp_path / "log.txt", "waits\n")
        os.kill(number, signal.SIGSTOP)
    assert group.poll() == 75


@pytest.mark.parametrize("stopped", [False, True])
def test_it_ends_with_its_launcher_and_stops_its_worlds(
    stopped: bool, environment: dict[str, str], tmp_path: Path
) -> None:
    stop = f"os.kill(fork_server._servers[0]._process.pid, {int(signal.SIGSTOP)})" if stopped else "pass"
    (tmp_path / "launcher.py").write_text(LAUNCHER.replace("    os._exit(9)", f"    {stop}\n    os._exit(9)"))
    marked = {**environment, SESSION: str(tmp_path / "session")}
    command = [sys.executable, str(tmp_path / "launcher.py"), str(tmp_path / "log.txt")]
    assert subprocess.run(command, env=marked, check=False).returncode == 9
    until_said(tmp_path / "log.txt", "asked to stop\nexit function\n")
    while processes_with_env(SESSION, str(tmp_path / "session")):
        time.sleep(0.01)
