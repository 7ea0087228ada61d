"""Process of each rank: `... engine.launch.rank SESSION`, or `midstride rank JOB --run R`."""

import contextlib
import faulthandler
import io
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

from midstride.engine.config.import_paths import make_importable
from midstride.engine.errors import SnapshotError, StopSignal
from midstride.engine.launch.launchers.base import RANK_MODULES
from midstride.engine.launch.watchdog import DUMP_STACKS
from midstride.engine.processes.lifetime import die_with_parent, tie_to_parent
from midstride.engine.processes.preload import preload
from midstride.engine.runs.run import Run
from midstride.engine.session.crash import crash_file, note_crashes, show_crashes
from midstride.engine.session.heartbeat import Heartbeat, Phase
from midstride.engine.session.outcome import Outcome
from midstride.engine.session.session import Session
from midstride.engine.world import World

if TYPE_CHECKING:
    from midstride.engine.loop.script_job import ScriptJob
    from midstride.engine.modules.module import DataModule, TrainingModule
    from midstride.engine.training.trainer import Trainer

__all__ = ["RankProcess", "build_all", "main", "print_whole_lines", "train_as_rank"]

#: seconds that a rank which is done waits for the others to be done too
_TOGETHER_S = 5.0
#: the path of a socket has at most 107 characters
_LONGEST_FOLDER = 80


def _stop_early(number: int, frame: FrameType | None) -> None:
    _ignore_stops()  # once is enough: the group and the agent may both pass it on
    raise StopSignal("asked to stop; a retry resumes from the last committed snapshot")


def _ignore_stops() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _put_sockets_into(folder: Path) -> None:
    """Make multiprocessing create sockets in `folder`, which is removed with the session."""
    if len(str(folder)) <= _LONGEST_FOLDER:
        multiprocessing.current_process()._config["tempdir"] = str(folder)  # type: ignore[attr-defined]


def print_whole_lines() -> None:
    """Flush after every line, and only then: several ranks print to one pipe."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


class RankProcess:
    """One rank of an attempt, from its session to its outcome.

    Args:
        session: where the job is read and the outcome written.
        world: where this process stands.
    """

    def __init__(self, session: Session, world: World) -> None:
        self.session = session
        self.world = world
        self._training: Trainer | ScriptJob | None = None

    def run(self) -> int:
        """Train as the session says; write how it ended, and return the exit code."""
        _put_sockets_into(self.session.folder)
        with contextlib.suppress(OSError):  # a full disk, which is told elsewhere
            note_crashes(crash_file(self.session.folder, self.world.rank))
        self._heartbeat = Heartbeat.of(self.world)  # kept: the launcher wants to know our process from here on
        if decided := self.session.outcomes():
            # Some rank has ended already: to go and meet the others now would be to wait for it in vain.
            return self._end(self._outcome_after(decided[0]))
        try:
            self._fit(Run.from_document(self.session.document()))
            return self._end(Outcome("done", rank=self.world.rank, step=self._step()))
        except BaseException as error:
            return self._end(_outcome_of(error, self.world, self._step()))

    def _fit(self, run: Run) -> None:
        _train(run, self._follow)

    def _follow(self, training: "Trainer | ScriptJob") -> None:
        self._training = training

    def _step(self) -> int | None:
        progress = getattr(self._training, "progress", None)
        step: int | None = getattr(progress, "step", None)
        return step

    def _outcome_after(self, decided: Outcome) -> Outcome:
        why = f"left at once: rank {decided.rank} had ended ({decided.kind})"
        return Outcome(decided.kind, why, rank=self.world.rank)

    def _end(self, outcome: Outcome) -> int:
        _ignore_stops()  # the outcome is being written
        self.session.write_outcome(outcome)
        self._heartbeat.enter(Phase.ENDED)
        if outcome.kind == "done":
            self._wait_for_peers()
        return outcome.code

    def _wait_for_peers(self) -> None:
        """Wait for the outcomes of this machine's ranks, which a crash of this process would stop."""
        deadline = time.monotonic() + _TOGETHER_S
        while len(self.session.outcomes()) < self.world.local_size and time.monotonic() < deadline:
            time.sleep(0.02)


def build_all(run: Run) -> "tuple[TrainingModule, DataModule, Trainer]":
    """Return the module, the data and the Trainer of a run, built in this process."""
    _prepare_imports(run)
    from midstride.engine.jobs.build import build_data, build_module, build_trainer
    from midstride.engine.seeds import seed_everything

    seed_everything(run.job.seed)
    return build_module(run.job), build_data(run.job), build_trainer(run.job)


def _prepare_imports(run: Run) -> None:
    make_importable(run.job.folder)
    # Torch is imported here: who reads this module without training needs none. Any optimizer needs its compiler.
    preload(*RANK_MODULES)


def _train(run: Run, follow: "Callable[[Trainer | ScriptJob], object]") -> None:
    """Train the module of the job of `run`.

    Before the first step, `follow` gets the object that counts steps. The launcher has checked that the run is free.
    """
    if run.job.script is None:
        module, data, trainer = build_all(run)
        follow(trainer)
        trainer.fit(module, data, run=run.url, take_over=True)
        return
    _prepare_imports(run)
    from midstride.engine.jobs.script import run_script
    from midstride.engine.loop.script_job import ScriptJob

    script = ScriptJob(run.job, run.url)
    follow(script)
    try:
        run_script(script)
    finally:
        script.close()


def _outcome_of(error: BaseException, world: World, step: int | None = None) -> Outcome:
    """Return how this rank ended by `error`, which is printed."""
    _ignore_stops()  # a launcher asks the others to stop as soon as one has left
    outcome = Outcome.of(error, rank=world.rank, step=step)
    if outcome.kind == "died" and not isinstance(error, SnapshotError):
        traceback.print_exc()
    elif outcome.kind != "user_error" and (outcome.kind != "stopped" or world.is_first):
        # A store's fault, such as a full disk, is in its words; a user's error the launcher tells, once.
        print(f"rank {world.rank}: {outcome.error}", file=sys.stderr, flush=True)
    return outcome


def train_as_rank(run: Run, world: World) -> Outcome:
    """Train `run` as one rank of a world that was started by others; return how it ended.

    The ranks end with the agent that started them; rank 0 writes the report. No supervisor of ours and no session:
    who started the world restarts it, and notices a hang.
    """
    from midstride.engine.runs.report_files import write_report

    die_with_parent(os.getppid())
    _prepare_process(sys.stderr)
    show_crashes()  # no launcher of ours does
    trainings: list[Trainer | ScriptJob] = []
    try:
        if world.is_first:
            run.save_job()
        _train(run, trainings.append)
        if world.is_first:
            write_report(run)
        return Outcome("done", rank=world.rank, step=getattr(trainings[0].progress, "step", None))
    except BaseException as error:
        sys.last_value = error  # as of an error that nothing catches: the other ranks may have ended
        outcome = _outcome_of(error, world)
        if outcome.kind == "user_error":  # there is no launcher that would tell it
            print(f"rank {world.rank}: error in the job or its code\n{outcome.error}", file=sys.stderr, flush=True)
        return outcome


def _prepare_process(stacks: IO[Any]) -> None:
    print_whole_lines()
    # The launcher asks for them when we hang. In one log, those of several ranks would be mixed.
    faulthandler.register(DUMP_STACKS, stacks, all_threads=True)
    # Importing torch takes seconds; a stop in that time is a stop, not a death. `fit` has its own handler.
    signal.signal(signal.SIGTERM, _stop_early)
    signal.signal(signal.SIGINT, _stop_early)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # there is nothing yet to take a snapshot of


def main() -> None:
    """Be the rank that the environment says this process is."""
    tie_to_parent()
    session, world = Session(sys.argv[1]), World.from_environment()
    _prepare_process(session.stacks(world.rank).open("ab"))  # it stays open
    with contextlib.suppress(ValueError):  # what `python -m` put there is not importable elsewhere
        sys.path.remove(str(Path.cwd()))
    os.environ[Session.VARIABLE] = str(session.folder)
    sys.exit(RankProcess(session, world).run())


if __name__ == "__main__":
    main()
