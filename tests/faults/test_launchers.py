"""Launchers: whatever ends first, no process of a world is left."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.watched_worlds import GRACE_S, Interrupted, Scene, alive, group_of, until
from laws.horovod_world import needs_horovod
from support.tiers import everything

from midstride.engine.processes.lifetime import descendants
from midstride.engine.processes.registered_ranks import RegisteredRanks
from midstride.engine.processes.supervised_process import SupervisedProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the ties are those of Linux")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


LAUNCHERS = ("inline", "spawn", "torchrun")
LAUNCHED = pytest.mark.parametrize("launcher", LAUNCHERS)


def by_signals(*few: tuple[str, str]) -> pytest.MarkDecorator:
    """Signals and launchers: all with `--laws=all`, else `few`, of which the tests below have each pair."""
    every = [(by, launcher) for by in ("SIGTERM", "SIGKILL", "SIGINT") for launcher in LAUNCHERS]
    cases = [pytest.param(*case, marks=() if case in few else everything) for case in every]
    return pytest.mark.parametrize(("by", "launcher"), cases)


@by_signals(
    *(("SIGKILL", "inline"), ("SIGINT", "inline"), ("SIGTERM", "spawn"), ("SIGINT", "spawn")),
    *(("SIGKILL", "torchrun"), ("SIGINT", "torchrun")),
)
def test_the_watcher_ends(
    scene: Scene, watcher: Callable[..., subprocess.Popen[bytes]], launcher: str, by: str
) -> None:
    watcher(launcher, "waits").send_signal(signal.Signals[by])
    scene.nobody_left()


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL], ids=lambda by: by.name)
def test_deaf_ranks_are_killed_after_the_grace(
    scene: Scene, watcher: Callable[..., subprocess.Popen[bytes]], by: signal.Signals
) -> None:
    process, began = watcher("inline", "deaf"), time.monotonic()
    process.send_signal(by)
    scene.nobody_left()
    assert time.monotonic() - began >= GRACE_S


@by_signals(("SIGTERM", "inline"), ("SIGKILL", "spawn"), ("SIGTERM", "torchrun"))
def test_the_supervisor_ends(
    scene: Scene, watcher: Callable[..., subprocess.Popen[bytes]], launcher: str, by: str
) -> None:
    process = watcher(launcher, "waits")
    os.kill(scene.pids("supervisor")[0], signal.Signals[by])
    scene.nobody_left()
    process.wait()


@LAUNCHED
def test_the_first_process_is_killed(
    scene: Scene, watcher: Callable[..., subprocess.Popen[bytes]], launcher: str
) -> None:
    process = watcher(launcher, "waits")
    os.kill(descendants(scene.pids("supervisor")[0])[0], signal.SIGKILL)
    scene.nobody_left()
    process.wait()


@pytest.mark.parametrize("launcher", ["spawn", "torchrun"])
def test_a_rank_is_killed(scene: Scene, watcher: Callable[..., subprocess.Popen[bytes]], launcher: str) -> None:
    process = watcher(launcher, "waits")
    os.kill(scene.pids("rank")[0], signal.SIGKILL)
    scene.nobody_left()
    process.wait()


#: who is killed under horovodrun -> how far above the rank, whose parent is a shell
ABOVE_A_RANK = {"rank": 0, "middleman": 2, "horovodrun": 3, "supervisor": 4, "watcher": 5}


@needs_horovod
@pytest.mark.parametrize("victim", ABOVE_A_RANK)
def test_horovodrun_leaves_nobody(scene: Scene, watcher: Callable[..., subprocess.Popen[bytes]], victim: str) -> None:
    process = watcher("horovodrun", "waits")
    pid = scene.pids("rank")[0]
    chain = [pid]
    while pid != process.pid:
        pid = parent_of(pid)
        chain.append(pid)
    if len(chain) == 5:  # a shell that becomes the rank
        chain.insert(1, chain[0])
    os.kill(chain[ABOVE_A_RANK[victim]], signal.SIGKILL)
    scene.nobody_left()
    process.wait()


#: horovodrun, giving what it signals a tenth of a second to leave, not five; what it starts reads this again
HASTY_HOROVODRUN = """
from horovod.runner.common.util import safe_shell_exec
from midstride.engine.launch.horovodrun_agent import main
safe_shell_exec.GRACEFUL_TERMINATION_TIME_S = 0.1
if __name__ == "__main__":
    main()
"""


#: A rank that needs longer to leave than that.
SLOW_TO_LEAVE = """
import os, signal, sys, time
from pathlib import Path
from midstride.engine.processes.lifetime import PARENT
folder = Path(sys.argv[1])
(folder / f"heartbeat-rank-r{os.environ['HOROVOD_RANK']}").write_bytes(os.getpid().to_bytes(8, sys.byteorder))
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
(folder / f"grandchild-{os.getpid()}").touch()
(folder / f"rank-{os.getpid()}").touch()
while not told:
    time.sleep(0.02)
time.sleep(1.0)
(folder / f"left-{os.getpid()}").touch()
"""


@needs_horovod
def test_ranks_under_horovodrun_have_the_whole_grace(scene: Scene) -> None:
    scene.rank_script = scene.script("slow", SLOW_TO_LEAVE)
    environment = {**os.environ, "MIDSTRIDE_SESSION": str(scene.folder), RegisteredRanks.VARIABLE: "here"}
    python, _, _, *arguments = scene.command("horovodrun", "waits")
    command = [python, scene.script("hasty", HASTY_HOROVODRUN), *arguments]
    with SupervisedProcess(command, environment=environment, log=scene.folder / "log.txt", grace_s=60.0) as group:
        scene.wait_until_up("horovodrun")
        assert group.stop() == 0
    assert len(scene.pids("left")) == 2


def test_watcher_and_supervisor_are_killed_together(
    scene: Scene, watcher: Callable[..., subprocess.Popen[bytes]]
) -> None:
    process = watcher("torchrun", "waits")
    supervisor = scene.pids("supervisor")[0]
    os.kill(supervisor, signal.SIGSTOP)  # it gets no chance
    process.kill()
    os.kill(supervisor, signal.SIGKILL)
    tied = scene.pids("rank")
    until(lambda: not any(alive(pid) for pid in tied), "the ranks to go")


@LAUNCHED
def test_an_exception_in_the_watch(scene: Scene, launcher: str) -> None:
    def watch() -> None:
        with group_of(scene, launcher, "waits"):
            scene.wait_until_up(launcher)
            raise Interrupted

    with pytest.raises(Interrupted):
        watch()
    assert not scene.living()  # `with` returns when all are gone


def test_a_second_interrupt_ends_it_at_once(scene: Scene) -> None:
    def again(*_: object) -> None:
        raise Interrupted

    def watch() -> None:
        with group_of(scene, "inline", "deaf", grace_s=600.0):
            scene.wait_until_up("inline")
            raise KeyboardInterrupt

    def interrupt() -> None:
        until((scene.folder / "asked").exists, "the rank to be asked to stop")
        os.kill(os.getpid(), signal.SIGALRM)

    before, second = signal.signal(signal.SIGALRM, again), threading.Thread(target=interrupt)
    try:
        second.start()
        with pytest.raises(Interrupted):
            watch()
    finally:
        second.join()
        signal.signal(signal.SIGALRM, before)
    assert not scene.living()
