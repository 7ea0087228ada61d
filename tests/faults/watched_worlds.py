"""Worlds whose processes a test watches."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.limit import LIMIT_S

from midstride.engine.processes.supervised_process import SupervisedProcess

GRACE_S = 1.0


#: A rank with a child and a grandchild that has a session of its own, each written down.
RANK = """
import os, signal, subprocess, sys, time
from pathlib import Path
from midstride.engine.processes.lifetime import PARENT, die_with_parent, exit_with_ancestors
parent = os.environ.pop(PARENT, None)
if "HOROVOD_RANK" in os.environ:
    exit_with_ancestors("MIDSTRIDE_SESSION")
    heartbeat = Path(sys.argv[1]) / f"heartbeat-rank-r{os.environ['HOROVOD_RANK']}"
    heartbeat.write_bytes(os.getpid().to_bytes(8, sys.byteorder))
elif parent:
    die_with_parent(int(parent))
folder, mode = Path(sys.argv[1]), sys.argv[2]
def note(name, pid):
    (folder / f"{name}-{pid}").touch()
if mode == "deaf":
    signal.signal(signal.SIGTERM, lambda *_: (folder / "asked").touch())
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
note("child", child.pid)
code = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(600)"
nest = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {code!r}])"
own = subprocess.Popen([sys.executable, "-c", nest], stdout=subprocess.PIPE, text=True)
note("grandchild", int(own.stdout.readline()))
own.wait()
note("rank", os.getpid())
print("rank is up", flush=True)
if mode == "leaves":
    sys.exit(0)
time.sleep(600)
"""


#: The fork server, its ranks such scripts.
SPAWN_AGENT = """
import runpy, sys
from midstride.engine.launch import spawn_agent
script, folder, mode = sys.argv[1:]
def rank():
    sys.argv = [script, folder, mode]
    runpy.run_path(script, run_name="__main__")
spawn_agent.RANK_MODULES, spawn_agent.rank_main = (), rank
sys.argv = ["spawn_agent", folder, "2", "30"]
spawn_agent.main()
"""


#: The process a flow is: it watches a group until it ends.
WATCHER = """
import os, sys, time
from pathlib import Path
from midstride.engine.cli.stop_signals import stoppable
from midstride.engine.processes.supervised_process import SupervisedProcess
folder, grace_s, *command = sys.argv[1:]
environment = {**os.environ, "MIDSTRIDE_SESSION": folder}
if "--gloo" in command:
    environment["MIDSTRIDE_ASKS_RANKS"] = "all"
log = Path(folder) / "log.txt"
with stoppable(), SupervisedProcess(command, environment=environment, log=log, grace_s=float(grace_s)) as group:
    (Path(folder) / f"supervisor-{group.pid}").touch()
    while group.poll() is None:
        time.sleep(0.02)
"""


def until(condition: Callable[[], bool], what: str, timeout_s: float = LIMIT_S) -> None:
    """Wait for `condition`, for as long as a busy machine may need."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"waited {timeout_s} s for {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Scene:
    """A folder in which the processes of one world write themselves down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank_script = self.script("rank", RANK)

    def script(self, name: str, text: str) -> str:
        path = self.folder / f"{name}.py"
        path.write_text(text)
        return str(path)

    def command(self, launcher: str, mode: str) -> list[str]:
        rank = [self.rank_script, str(self.folder), mode]
        if launcher == "inline":
            return [sys.executable, *rank]
        if launcher == "horovodrun":
            agent = [sys.executable, "-m", "midstride.engine.launch.horovodrun_agent", "--gloo", "--disable-cache"]
            return [*agent, "--start-timeout", "120", "-np", "2", sys.executable, *rank]
        if launcher == "spawn":
            return [sys.executable, self.script("spawn_agent", SPAWN_AGENT), *rank]
        agent = [sys.executable, "-m", "midstride.engine.launch.torchrun_agent", "--nproc-per-node=2"]
        return [*agent, "--monitor-interval=0.1", *rank]

    def pids(self, name: str = "*") -> list[int]:
        return [int(path.name.rpartition("-")[2]) for path in self.folder.glob(f"{name}-[0-9]*")]

    def wait_until_up(self, launcher: str) -> None:
        ranks = 1 if launcher == "inline" else 2
        until(lambda: len(self.pids("rank")) == ranks, "all ranks to be up")
        assert len(self.pids("grandchild")) == ranks
        assert all(alive(pid) for pid in self.pids())

    def living(self) -> list[int]:
        return [pid for pid in self.pids() if alive(pid)]

    def nobody_left(self) -> None:
        until(lambda: not self.living(), "the last process to go")


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    for pid in scene.pids():
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def watcher(scene: Scene) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(launcher: str, mode: str, grace_s: float = GRACE_S) -> subprocess.Popen[bytes]:
        script = scene.script("watcher", WATCHER)
        command = [sys.executable, script, str(scene.folder), str(grace_s), *scene.command(launcher, mode)]
        started.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        scene.wait_until_up(launcher)
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


class Interrupted(BaseException):
    """What an orchestrator raises into the main thread."""


def group_of(scene: Scene, launcher: str, mode: str, grace_s: float = GRACE_S) -> SupervisedProcess:
    environment = {**os.environ, "MIDSTRIDE_SESSION": str(scene.folder)}
    log = scene.folder / "log.txt"
    return SupervisedProcess(scene.command(launcher, mode), environment=environment, log=log, grace_s=grace_s)
