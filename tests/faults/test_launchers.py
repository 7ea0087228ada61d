"""Law 6, no orphan: whatever ends a world or who watches it, no process of the world lives on.

The ranks here are small stand-ins, so that every way to end can be tried; torchrun is the real one.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from laws.horovod_world import needs_horovod

from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import JobError
from midstride.engine.launch import launch as launching
from midstride.engine.launch.launch import launch
from midstride.engine.launch.launchers.base import Launcher
from midstride.engine.launch.launchers.registry import LAUNCHERS, build_launcher
from midstride.engine.processes.lifetime import descendants
from midstride.engine.processes.registered_ranks import Wards
from midstride.engine.processes.supervised import ProcessGroup
from midstride.engine.session.attempts import Ledger
from midstride.engine.session.events import Event
from midstride.engine.session.session import Session
from midstride.engine.storage.store import Store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the ties are those of Linux")

GRACE_S = 1.0

#: A rank with a child and a grandchild that has a session of its own, each written down.
RANK = """
import os, signal, subprocess, sys, time
from pathlib import Path
from midstride.engine.processes.lifetime import PARENT, die_with_parent, end_with_ancestors
parent = os.environ.pop(PARENT, None)
if "HOROVOD_RANK" in os.environ:
    end_with_ancestors("MIDSTRIDE_SESSION")
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

#: The spawner, its ranks such scripts.
SPAWNER = """
import runpy, sys
from midstride.engine.launch import fork_server as spawner
script, folder, mode = sys.argv[1:]
def rank():
    sys.argv = [script, folder, mode]
    runpy.run_path(script, run_name="__main__")
spawner._PRELOAD, spawner.be_a_rank = (), rank
sys.argv = ["spawner", folder, "2", "30"]
spawner.main()
"""

#: The process a flow is: it watches a group until it ends.
WATCHER = """
import os, sys, time
from pathlib import Path
from midstride.engine.cli.app import stoppable
from midstride.engine.processes.supervised import ProcessGroup
folder, grace_s, *command = sys.argv[1:]
environment = {**os.environ, "MIDSTRIDE_SESSION": folder}
if "--gloo" in command:
    environment["MIDSTRIDE_ASKS_RANKS"] = "all"
log = Path(folder) / "log.txt"
with stoppable(), ProcessGroup(command, environment=environment, log=log, grace_s=float(grace_s)) as group:
    (Path(folder) / f"keeper-{group.pid}").touch()
    while group.poll() is None:
        time.sleep(0.02)
"""


def until(condition: Callable[[], bool], what: str, timeout_s: float = 100.0) -> None:
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


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


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
            return [sys.executable, self.script("spawner", SPAWNER), *rank]
        agent = [sys.executable, "-m", "midstride.engine.launch.torchrun_agent", "--standalone", "--nproc-per-node=2"]
        return [*agent, "--monitor-interval=0.1", "--shutdown-timeout=30", *rank]

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
def watcher(scene: Scene) -> Iterator[Callable[[str, str], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(launcher: str, mode: str) -> subprocess.Popen[bytes]:
        script = scene.script("watcher", WATCHER)
        command = [sys.executable, script, str(scene.folder), str(GRACE_S), *scene.command(launcher, mode)]
        started.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        scene.wait_until_up(launcher)
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


LAUNCHED = pytest.mark.parametrize("launcher", ["inline", "spawn", "torchrun"])


@LAUNCHED
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT], ids=lambda by: by.name)
def test_the_watcher_ends(
    scene: Scene, watcher: Callable[..., subprocess.Popen[bytes]], launcher: str, by: signal.Signals
) -> None:
    watcher(launcher, "waits").send_signal(by)
    scene.nobody_left()


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL], ids=lambda by: by.name)
def test_deaf_ranks_are_killed_after_the_grace(
    scene: Scene, watcher: Callable[..., subprocess.Popen[bytes]], by: signal.Signals
) -> None:
    process, began = watcher("inline", "deaf"), time.monotonic()
    process.send_signal(by)
    scene.nobody_left()
    assert time.monotonic() - began >= GRACE_S


@LAUNCHED
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL], ids=lambda by: by.name)
def test_the_keeper_ends(
    scene: Scene, watcher: Callable[..., subprocess.Popen[bytes]], launcher: str, by: signal.Signals
) -> None:
    process = watcher(launcher, "waits")
    os.kill(scene.pids("keeper")[0], by)
    scene.nobody_left()
    process.wait()


@LAUNCHED
def test_the_first_process_is_killed(
    scene: Scene, watcher: Callable[..., subprocess.Popen[bytes]], launcher: str
) -> None:
    process = watcher(launcher, "waits")
    os.kill(descendants(scene.pids("keeper")[0])[0], signal.SIGKILL)
    scene.nobody_left()
    process.wait()


@pytest.mark.parametrize("launcher", ["spawn", "torchrun"])
def test_a_rank_is_killed(scene: Scene, watcher: Callable[..., subprocess.Popen[bytes]], launcher: str) -> None:
    process = watcher(launcher, "waits")
    os.kill(scene.pids("rank")[0], signal.SIGKILL)
    scene.nobody_left()
    process.wait()


#: who is killed under horovodrun -> how far above the rank, whose parent is a shell
ABOVE_A_RANK = {"rank": 0, "middleman": 2, "horovodrun": 3, "keeper": 4, "watcher": 5}


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


#: A rank that needs longer to leave than horovodrun would give it.
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
time.sleep(6.0)
(folder / f"left-{os.getpid()}").touch()
"""


@needs_horovod
def test_ranks_under_horovodrun_have_the_whole_grace(scene: Scene) -> None:
    scene.rank_script = scene.script("slow", SLOW_TO_LEAVE)
    environment = {**os.environ, "MIDSTRIDE_SESSION": str(scene.folder), Wards.VARIABLE: "here"}
    command = scene.command("horovodrun", "waits")
    with ProcessGroup(command, environment=environment, log=scene.folder / "log.txt", grace_s=60.0) as group:
        scene.wait_until_up("horovodrun")
        assert group.stop() == 0
    assert len(scene.pids("left")) == 2


def test_watcher_and_keeper_are_killed_together(scene: Scene, watcher: Callable[..., subprocess.Popen[bytes]]) -> None:
    process = watcher("torchrun", "waits")
    keeper = scene.pids("keeper")[0]
    os.kill(keeper, signal.SIGSTOP)  # it gets no chance
    process.kill()
    os.kill(keeper, signal.SIGKILL)
    tied = scene.pids("rank")
    until(lambda: not any(alive(pid) for pid in tied), "the ranks to go")


class Interrupted(BaseException):
    """What an orchestrator raises into the main thread."""


def group_of(scene: Scene, launcher: str, mode: str, grace_s: float = GRACE_S) -> ProcessGroup:
    environment = {**os.environ, "MIDSTRIDE_SESSION": str(scene.folder)}
    log = scene.folder / "log.txt"
    return ProcessGroup(scene.command(launcher, mode), environment=environment, log=log, grace_s=grace_s)


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


def test_what_a_world_leaves_behind_at_its_own_end(scene: Scene) -> None:
    with group_of(scene, "inline", "leaves") as group:
        until(lambda: group.poll() is not None, "the group to end")
        assert group.poll() == 0
        assert not scene.living(), "the keeper ends them, also where nobody watches any more"


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    with ProcessGroup(["/no/such"], environment=dict(os.environ), log=tmp_path / "log", grace_s=1) as group:
        until(lambda: group.poll() is not None, "the group to end")
    assert group.poll() == 127
    assert "cannot run /no/such" in (tmp_path / "log").read_text()


def test_output_comes_in_whole_lines(tmp_path: Path) -> None:
    code = r"""
import sys, time
from pathlib import Path
print("\r1 %\r2 %\r\n", end="ha", flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
print("lf\xe9")
sys.stdout.write("end")
"""
    seen, batches = tmp_path / "seen", list[list[str]]()
    command = [sys.executable, "-c", code, str(seen)]

    def ended() -> bool:
        if lines := group.lines():
            batches.append(lines)
            seen.touch()
        return group.poll() is not None

    with ProcessGroup(command, environment=dict(os.environ), log=tmp_path / "log", grace_s=1) as group:
        until(ended, "the group to end")
    batches.append(group.lines())
    assert [line for batch in batches for line in batch] == ["", "1 %", "2 %", "halfé", "end"]
    assert len([batch for batch in batches if batch]) > 1


#: A rank that prints, and says so if printing fails.
TALKER = """
import signal, sys, time
from pathlib import Path
folder, told = Path(sys.argv[1]), []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
(folder / f"rank-{__import__('os').getpid()}").touch()
(folder / f"grandchild-{__import__('os').getpid()}").touch()
try:
    while not told:
        print("still here " * 1000, flush=True)
        time.sleep(0.01)
    for _ in range(100):
        print("leaving " * 1000, flush=True)
    (folder / "left").touch()
except BaseException as error:
    (folder / "failed").write_text(repr(error))
"""


def test_ranks_can_print_after_their_watcher_was_killed(
    scene: Scene, watcher: Callable[..., subprocess.Popen[bytes]]
) -> None:
    scene.rank_script = scene.script("talker", TALKER)
    watcher("inline", "talks").kill()
    scene.nobody_left()
    assert not (scene.folder / "failed").exists()
    assert (scene.folder / "left").exists()


# --- launch: the same, with a session, outcomes and the ledger ---------------------------------------------

WORLD = """
import json, os, signal, sys, time
from midstride.engine.errors import JobError, StopRequested
from midstride.engine.session.events import EventLog
from midstride.engine.session.outcome import Outcome
from midstride.engine.session.session import Session
from midstride.engine.launch.rank import print_whole_lines
print_whole_lines()
session, rank = Session(os.environ["MIDSTRIDE_SESSION"]), int(os.environ.get("RANK", "0"))
document = session.document()
attempt, mode = document["attempt"], document["job"]["module_args"]["mode"]
if rank == 0:
    events = EventLog(session.events)
    events.emit("resumed", generation=attempt, resumed_from=None, step=0)
    events.emit("step", step=1, epoch=0, loss=0.5)
    events.emit("snapshot", name=f"{20 * attempt:012d}-g{attempt:06d}", step=20)
print("rank", rank, "runs with", os.environ["OMP_NUM_THREADS"], "threads", hash("text"), flush=True)
def end(outcome):
    session.write_outcome(outcome)
    sys.exit(outcome.code)
def stop(*_):
    end(Outcome.of(StopRequested("asked to stop"), rank=rank, step=1))
signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "deaf" else stop)
if mode == "done":
    session.write_outcome(Outcome("done", rank=rank, step=20))
    while len(session.outcomes()) < int(os.environ.get("WORLD_SIZE", "1")):
        time.sleep(0.01)
    os.abort() if rank == 0 else sys.exit(0)  # torn down badly after the last word
if mode == "kill" and rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "wrong" and rank == 0:
    end(Outcome.of(JobError("bad job"), rank=rank))
time.sleep(600)
"""


class StandIn(Launcher):
    """A launcher whose ranks are the script above."""

    name = "stand-in"

    def __init__(self, script: str, real: Launcher) -> None:
        self.script, self.real = script, real

    def command(self, session: Session, job: TrainingJob, *, grace_s: float) -> list[str]:
        command = self.real.command(session, job, grace_s=grace_s)
        start = command.index("--module") if "--module" in command else 1
        return [*command[:start], self.script]


@pytest.fixture
def job_of(tmp_path: Path) -> Iterator[Callable[..., TrainingJob]]:
    script = tmp_path / "world.py"
    script.write_text(WORLD)

    def job(mode: str, strategy: str = "single") -> TrainingJob:
        path = tmp_path / "job.yaml"
        world = {"strategy": strategy, "processes": 1 if strategy == "single" else 2}
        document = {"name": "a", "module": "m:M", "data": "m:D", "trainer": {"max_steps": 1}, "world": world}
        path.write_text(json.dumps({**document, "module_args": {"mode": mode}}))
        return TrainingJob.load(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "build_launcher", lambda name: StandIn(str(script), build_launcher(name)))
        patch.delenv("OMP_NUM_THREADS", raising=False)
        yield job


def ledger_of(job: TrainingJob) -> Ledger:
    return Ledger(Store.open(job.run_url("night")))


@pytest.mark.parametrize("strategy", ["single", "ddp"])
@pytest.mark.parametrize(
    ("mode", "kind", "retry"), [("done", "done", False), ("wrong", "user_error", False), ("kill", "died", True)]
)
def test_how_it_ended(job_of: Callable[..., TrainingJob], strategy: str, mode: str, kind: str, retry: bool) -> None:
    job = job_of(mode, strategy)
    lines: list[str] = []
    events: list[Event] = []
    outcome = launch(job, "night", on_line=lines.append, on_event=events.append, grace_s=5)
    assert outcome.kind == kind
    assert [event.kind for event in events] == ["resumed", "step", "snapshot"]
    assert "rank 0 runs with" in "\n".join(lines)
    # Sets of text have the same order in every rank and every life.
    hashes = set(re.findall(r"runs with \S+ threads (\S+)", "\n".join(lines)))
    python = [sys.executable, "-c", "print(hash('text'))"]
    same = subprocess.run(python, env={**os.environ, "PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True)
    assert hashes == {same.stdout.strip()}
    assert "OMP_NUM_THREADS" not in "\n".join(lines)
    attempt = ledger_of(job).attempts()[0]
    assert (attempt.outcome, attempt.generation, attempt.snapshot) == (kind, 1, "000000000020-g000001")
    assert attempt.first_step_at is not None
    assert ledger_of(job).verdict(job.retries).retry is retry
    assert b"rank 0 runs with" in Store.open(job.run_url("night")).read("attempts/000001.log")


@pytest.mark.parametrize("callback", ["on_event", "on_line"])
def test_an_exception_in_the_pump(job_of: Callable[..., TrainingJob], callback: str) -> None:
    def fail(_: object) -> None:
        raise Interrupted

    job = job_of("waits")
    with pytest.raises(Interrupted):
        launch(job, "night", grace_s=5, **{callback: fail})  # type: ignore[arg-type]
    attempt = ledger_of(job).attempts()[0]
    assert (attempt.outcome, attempt.code) == ("stopped", 75)


def test_a_world_that_does_not_stop_in_time_was_stopped_all_the_same(job_of: Callable[..., TrainingJob]) -> None:
    def interrupt(event: Event) -> None:
        if event.kind == "snapshot":
            raise Interrupted

    job = job_of("deaf")
    with pytest.raises(Interrupted):
        launch(job, "night", on_event=interrupt, grace_s=1)
    attempt = ledger_of(job).attempts()[0]
    assert (attempt.outcome, attempt.code) == ("stopped", 75)
    assert attempt.error.startswith("asked to stop, and ended when the grace of 1 s was over; rank 0 ended")


def test_a_timeout(job_of: Callable[..., TrainingJob]) -> None:
    started: list[Event] = []
    others = descendants(os.getpid())  # what ranks are forked from, if laws are tested too

    def expire(*_: object) -> None:
        raise Interrupted

    def on_event(event: Event) -> None:
        if not started:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
        started.append(event)

    before = signal.signal(signal.SIGALRM, expire)
    job = job_of("waits", "ddp")
    try:
        with pytest.raises(Interrupted):
            launch(job, "night", on_event=on_event, grace_s=5)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ledger_of(job).attempts()[0].outcome == "stopped"
    assert set(descendants(os.getpid())) <= set(others)


def test_a_store_that_cannot_be_written(job_of: Callable[..., TrainingJob], tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the store should be")
    with pytest.raises(JobError, match=r"snapshots\.url"):
        launch(job_of("done"), "night")


def test_every_launcher_can_be_built() -> None:
    assert [build_launcher(name).name for name in LAUNCHERS] == list(LAUNCHERS)
    with pytest.raises(JobError, match="there are: horovodrun, inline, spawn, torchrun"):
        build_launcher("slurm")
