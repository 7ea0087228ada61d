"""The watchdog: what counts as a hang, what does not, and which rank is slow."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.flow_runs import wait_for
from support.limit import LIMIT_S

from midstride.engine.config.world import WorldOptions
from midstride.engine.launch import watchdog
from midstride.engine.launch.machines.rounds import RoundWatchdog
from midstride.engine.launch.watchdog import WINDOW_S, Watchdog, write_stacks
from midstride.engine.session.heartbeat import Heartbeat, HeartbeatReading, Phase
from midstride.engine.session.session import Session

LIMITS = {"hang_timeout_s": 10, "startup_timeout_s": 100, "validation_timeout_s": 50}


class World:
    """Three ranks whose hearts the test beats, and a clock that it turns."""

    def __init__(self, folder: Path, patience_s: float = 0.0, **limits: float | None) -> None:
        self.now = 0.0
        session = Session(folder)
        self.ranks = [Heartbeat(session.heartbeat(rank)) for rank in range(3)]
        self.options = WorldOptions(strategy="ddp", processes=3, **{**LIMITS, **limits})  # type: ignore[arg-type]
        self.watchdog = Watchdog(session, self.options, patience_s, lambda: self.now)

    def stuck_after(self, seconds: float) -> str:
        self.watchdog.hang()
        self.now += seconds
        hang = self.watchdog.hang()
        return "" if hang is None else hang.message("rank {} on node far".format)

    def train(self, batches: int, seconds: list[float]) -> None:
        """Let every rank do batches, each at its own pace."""
        for rank, each in zip(self.ranks, seconds, strict=True):
            for _ in range(batches):
                rank._cells[4] += 1
                rank.beat(rank._cells[3] + 1)
                rank._cells[5] += int(each * 1e9)
        self.now += batches * max(seconds)


@pytest.mark.parametrize(
    ("phase", "limit", "option"),
    [
        (Phase.STARTING, 100, "startup_timeout_s"),
        (Phase.TRAINING, 10, "hang_timeout_s"),
        (Phase.EVALUATING, 50, "validation_timeout_s"),
        (Phase.ENDED, 10, "hang_timeout_s"),
    ],
)
def test_every_phase_has_its_limit(phase: Phase, limit: float, option: str, tmp_path: Path) -> None:
    world = World(tmp_path)
    for rank in world.ranks:
        rank.enter(phase)
    assert not world.stuck_after(limit)
    assert option in world.stuck_after(limit + 1)


def test_who_watches_beside_another_is_the_more_patient(tmp_path: Path) -> None:
    world = World(tmp_path, patience_s=60)
    for rank in world.ranks:
        rank.enter(Phase.TRAINING)
    assert not world.stuck_after(10 + 60)
    assert "no rank did a batch for 10 s" in world.stuck_after(10 + 61)


def test_a_beat_of_any_rank_is_progress(tmp_path: Path) -> None:
    world = World(tmp_path)
    for _ in range(5):
        world.ranks[1].beat(7)
        assert not world.stuck_after(90)
    assert "after step 7" in world.stuck_after(101)


def test_a_world_suspended_with_its_launcher_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, session = World(tmp_path), Session(tmp_path)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: world.now))
    for rank in world.ranks:
        rank.enter(Phase.TRAINING)
    world.watchdog, of_round = Watchdog(session, world.options), RoundWatchdog(session, world.options)
    assert of_round.look() is None
    assert not world.stuck_after(1e6)
    assert of_round.look() is None
    looks = [(bool(world.stuck_after(1)), of_round.look() is not None) for _ in range(10)]
    assert (looks[0], looks.count((True, True))) == ((False, False), 1), "what came after it counts"


def test_the_most_patient_limit_counts(tmp_path: Path) -> None:
    world = World(tmp_path)
    for rank, phase in zip(world.ranks, (Phase.TRAINING, Phase.EVALUATING, Phase.ENDED), strict=True):
        rank.enter(phase)
    assert not world.stuck_after(50)
    assert "validation" in world.stuck_after(51)


def test_waiting_for_a_store_is_no_hang(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.ranks[0].beat(1)
    with world.ranks[2].during(Phase.WAITING):
        assert not world.stuck_after(1e6)
    assert world.stuck_after(1e6)


def test_a_limit_may_be_off(tmp_path: Path) -> None:
    assert not World(tmp_path, startup_timeout_s=None).stuck_after(1e9)


def test_ranks_on_other_machines_are_not_judged(tmp_path: Path) -> None:
    world = World(tmp_path)
    for rank in range(3):
        Session(tmp_path).heartbeat(rank).unlink()
    world.watchdog._options = world.watchdog._options.model_copy(update={"hosts": "far:3"})
    assert not world.stuck_after(1e9)


def test_ranks_that_never_started_hang_too(tmp_path: Path) -> None:
    world = World(tmp_path)
    for rank in range(3):
        Session(tmp_path).heartbeat(rank).unlink()
    assert world.stuck_after(101)
    assert world.watchdog.heartbeats() == [HeartbeatReading()] * 3


def works(world: World, session: Session) -> None:
    world.ranks[0].begin_work()
    world.ranks[0].end_work()
    world.ranks[2].begin_work()


def is_behind(world: World, session: Session) -> None:
    for rank in (0, 1):
        world.ranks[rank].beat(1)


def is_suspended(world: World, session: Session) -> None:
    works(world, session)
    HeartbeatReading(is_suspended=True).write(session.heartbeat(1))


@pytest.mark.parametrize(
    ("begin", "words"),
    [
        (works, "The others wait for rank 2 on node far: still reading a batch, or in the training step."),
        (is_behind, "The others wait for rank 2 on node far: a batch behind."),
        (is_suspended, "The others wait for rank 1 on node far: suspended, by SIGSTOP or a debugger."),
    ],
)
def test_the_rank_that_the_others_wait_for_is_named(
    begin: Callable[[World, Session], None], words: str, tmp_path: Path
) -> None:
    world = World(tmp_path)
    assert "wait for" not in world.stuck_after(101)
    begin(world, Session(tmp_path))
    assert words in world.stuck_after(101)


def test_a_slow_rank_is_named_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    found = []
    for _ in range(4):
        world.train(100, [0.1, 0.5, 0.1])
        found.append(world.watchdog.straggler())
    assert found[0] is None, "there is nothing yet to compare with"
    assert found[1] is not None
    assert (found[1].rank, found[2:]) == (1, [None, None])
    assert "500 ms" in str(found[1])
    assert "the others 100 ms" in str(found[1])


@pytest.mark.parametrize(
    "seconds", [[0.4, 0.4, 0.4], [0.4, 0.5, 0.4], [0.001, 0.004, 0.001]], ids=["even", "nearly even", "too little"]
)
def test_small_differences_are_not_told(seconds: list[float], tmp_path: Path) -> None:
    world = World(tmp_path)
    for _ in range(3):
        world.train(100, seconds)
        world.now += WINDOW_S
        assert world.watchdog.straggler() is None


def test_a_round_that_hangs_has_time_to_write_its_stacks(tmp_path: Path) -> None:
    world = World(tmp_path)
    for rank in world.ranks:
        rank.enter(Phase.TRAINING)
    of_round = RoundWatchdog(Session(tmp_path), world.options, lambda: world.now)
    assert of_round.look() is None
    world.now = 11.0
    assert of_round.look() is not None
    assert of_round.look() is None  # it was said
    assert of_round.hang is not None
    assert not of_round.stacks_are_late()
    world.now = 22.0
    assert of_round.stacks_are_late()


#: ranks that take their time to write their stacks: each waits until all are asked
SLOW_TO_WRITE = """
import pathlib, signal, sys, time
asked = pathlib.Path(sys.argv[1])
def write(*_):
    asked.touch()
    while len([*asked.parent.glob("asked-*")]) < 3:
        time.sleep(0.01)
    time.sleep(0.5)
    print("stack of", asked.name, flush=True)
signal.signal(signal.SIGUSR2, write)
asked.with_name("up-" + asked.name).touch()
while True:
    time.sleep(600)
"""


def test_stacks_of_ranks_on_a_busy_machine_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are asked side by side, and each stands below the line of its rank."""
    monkeypatch.setattr(watchdog, "_LOOK_S", 0.01)
    monkeypatch.setattr(watchdog, "_NO_STACKS_S", LIMIT_S)
    session, log = Session(tmp_path), tmp_path / "log.txt"
    with ExitStack() as ended:
        ranks = {}
        for rank in range(3):
            out = ended.enter_context(session.stacks(rank).open("ab"))
            command = [sys.executable, "-c", SLOW_TO_WRITE, str(tmp_path / f"asked-{rank}")]
            process = ended.enter_context(subprocess.Popen(command, stdout=out))
            ended.callback(process.kill)
            ranks[rank] = HeartbeatReading(pid=process.pid)
        wait_for(lambda: len([*tmp_path.glob("up-*")]) == 3, "the ranks")
        write_stacks(ranks, session, log)
    found = [text.splitlines()[1] for text in log.read_text().split("\n--- rank ")[1:]]
    assert found == [f"stack of asked-{rank}" for rank in range(3)]
