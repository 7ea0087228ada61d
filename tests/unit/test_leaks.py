"""What a test leaves behind is found, so that every other test may be held to leave nothing."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from support.leaks import LASTING_PROCESSES, Surroundings

TOKEN = "MIDSTRIDE_TEST_OF_LEAKS=1"
#: sleeps until it is killed; once it is asked to, as the child of a child that has ended
SLEEP = (
    "import os, sys, time; (os.fork() and os._exit(0)) if sys.argv[1:] else None; print(os.getpid()); time.sleep(600)"
)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def _start(*arguments: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-S", "-c", SLEEP, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)


def _pid(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def test_nothing_is_found_where_nothing_was_left() -> None:
    before = Surroundings(TOKEN, grace_s=0.0)
    subprocess.run([sys.executable, "-S", "-c", ""], check=True)
    assert before.leaks() == []


def test_a_variable_is_found_and_put_back() -> None:
    before = Surroundings(TOKEN, grace_s=0.0)
    os.environ["MIDSTRIDE_LEFT"] = "1"
    assert before.leaks() == ["environment variable MIDSTRIDE_LEFT='1', was None"]
    assert "MIDSTRIDE_LEFT" not in os.environ


def test_a_handler_of_a_signal_is_found_and_put_back() -> None:
    handler = signal.getsignal(signal.SIGUSR2)
    before = Surroundings(TOKEN, grace_s=0.0)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    assert [leak.partition(" <")[0] for leak in before.leaks()] == ["handler of SIGUSR2"]
    assert signal.getsignal(signal.SIGUSR2) is handler


def test_a_thread_is_found() -> None:
    before, end = Surroundings(TOKEN, grace_s=0.0), threading.Event()
    thread = threading.Thread(target=end.wait, name="left", daemon=True)
    thread.start()
    assert before.leaks() == ["thread left"]
    end.set()
    thread.join()


def test_a_new_child_is_found_unless_it_may_last(started: list[subprocess.Popen[str]]) -> None:
    before = Surroundings(TOKEN, grace_s=0.0)
    started.append(child := _start())
    assert [leak.partition(":")[0] for leak in before.leaks()] == [f"process {_pid(child)}"]
    assert Surroundings(TOKEN, grace_s=0.0).leaks() == []
    LASTING_PROCESSES.add(child.pid)
    try:
        assert before.leaks() == []
    finally:
        LASTING_PROCESSES.discard(child.pid)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"env": {}}, id="of this process group"),
        pytest.param({"env": dict([TOKEN.split("=")]), "start_new_session": True}, id="of a session of its own"),
    ],
)
def test_an_orphan_is_found(options: dict[str, object], started: list[subprocess.Popen[str]]) -> None:
    before = Surroundings(TOKEN, grace_s=0.0)
    started.append(child := _start("orphan", **options))
    orphan = _pid(child)
    child.wait()
    try:
        assert [leak.partition(":")[0] for leak in before.leaks()] == [f"process {orphan}"]
    finally:
        os.kill(orphan, 9)
