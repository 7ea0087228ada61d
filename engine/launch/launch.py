"""Launch one world, watch it to its end, and leave nothing of it behind."""

import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import FrameType

from midstride.engine.errors import EngineError, JobError, StoreUnsafe, WorldError
from midstride.engine.launch.launchers.base import Launcher
from midstride.engine.launch.launchers.build import build_launcher, world_command
from midstride.engine.launch.log_lines import without_noise
from midstride.engine.launch.preemption import PreemptionWatch
from midstride.engine.launch.recovery import recover_orphaned_attempts
from midstride.engine.launch.watchdog import Watchdog
from midstride.engine.processes.signal_handlers import signal_handlers
from midstride.engine.processes.supervised_process import SupervisedProcess
from midstride.engine.runs.ending import ending_of
from midstride.engine.runs.forked_job import as_forked
from midstride.engine.runs.run import Run
from midstride.engine.session.attempts import Attempt
from midstride.engine.session.events import Event, EventTail
from midstride.engine.session.outcome import Outcome, decide, not_started
from midstride.engine.session.requests import GRACE_S, SignalRequests
from midstride.engine.session.session import Session
from midstride.engine.slurm import step_tasks
from midstride.engine.snapshots.beat import beating, ensure_none_elsewhere
from midstride.engine.snapshots.catalog import RUN_FILES, RUN_FOLDERS
from midstride.engine.snapshots.holder import ensure_free
from midstride.engine.snapshots.lease import generations
from midstride.engine.storage.store import Store

__all__ = ["GRACE_S", "launch"]

log = logging.getLogger(__name__)

_POLL_S = 0.1
_LINES_EVERY_S = 0.5
_LINES_AT_ONCE = 200
_LAST_LINES = 8
_LOG_BYTES = 1 << 20
_NODES_S = 60.0


def _ignore(_: object) -> None:
    """Take no notice."""


def _nothing() -> None:
    """Do nothing."""


def launch(
    run: Run,
    *,
    on_line: Callable[[str], object] = _ignore,
    on_event: Callable[[Event], object] = _ignore,
    stop_if_asked: Callable[[], object] = _nothing,
    grace_s: float = GRACE_S,
    take_over: bool = False,
) -> Outcome:
    """Run one world of `run` to its end, resuming it if it has been started before.

    Any exception can interrupt it at any time, such as a timeout or one that the handler of a signal raises. It then
    stops the world within `grace_s` plus 2 s, records the attempt and re-raises. Python runs handlers of signals in
    the main thread only: in other threads, `stop_if_asked` raises that exception.

    Args:
        run: the run to train; a done run ends at once.
        on_line: called with printed lines, several joined, at most every half second.
        on_event: called with each event once.
        stop_if_asked: called ten times a second; an exception that it raises stops the world.
        grace_s: seconds that a world has to take a snapshot and end when it is asked to stop.
        take_over: take the run from another process that trains it now; else that is an error.

    Returns:
        How the world ended. Its errors are outcomes, not exceptions. A command that is refused before it has the lease
        of a run that was trained before leaves the run's records as they are.

    Raises:
        RunHeld: another process on this machine, or a launcher on another one, trains the run; nothing was started.
        JobError: the run's name, its store or a launcher of the user's own cannot be used; nothing was started.
        UserCodeError: that launcher raised; nothing was started.
        StrategyUnavailable: what starts its processes is not installed; nothing was started.
        SnapshotError: the store does not answer; a retry may help.
    """
    _ensure_started_once()
    run = _opened(run)
    job = run.job
    launcher = build_launcher(job.world.launched_by, job.folder)
    attempt, before = _begin_attempt(run, None if take_over else partial(_ensure_free, run, on_line, stop_if_asked))
    with Session.held(run.document(attempt.number, attempt.started)) as session:
        # Nodes that hang are ended by the process that holds their rendezvous, unless that hangs as well.
        watchdog = Watchdog(session, job.world, patience_s=_NODES_S if job.world.launched_by == "join" else 0.0)
        monitor = _WorldMonitor(session, attempt, watchdog, on_line, on_event)
        try:
            _train(run, launcher, session, monitor, stop_if_asked, grace_s)
        finally:
            asked_by = sys.exception()
            try:
                monitor.hand_on_rest()
            finally:  # whatever its receivers raise, the attempt is recorded
                outcome = monitor.outcome(session.ranks or job.world.processes, grace_s)
                if before is not None and outcome.kind == "user_error" and monitor.attempt.generation is None:
                    outcome = replace(outcome, is_refusal=_withdraw(run, monitor.attempt, before, on_line))
                if outcome.is_refusal:
                    session.remove()
                else:
                    _record_attempt(run, monitor.attempt, outcome, session, on_line, asked_by)
    return outcome


def _train(
    run: Run,
    launcher: Launcher,
    session: Session,
    monitor: "_WorldMonitor",
    stop_if_asked: Callable[[], object],
    grace_s: float,
) -> None:
    """Start the world of a session, and watch it until it ends."""
    try:
        command, environment = world_command(launcher, session, run.job, grace_s)
    except EngineError as error:
        session.write_outcome(Outcome.of(error))  # the attempt ended by it
        raise
    environment[SignalRequests.VARIABLE] = str(grace_s)
    with (
        signal_handlers({signal.SIGUSR1: monitor.snapshot_on_signal}),
        PreemptionWatch(run.job.world.preemption_notice, monitor.snapshot_on_notice, monitor.announce),
        beating(run.store),  # until the world has ended: a store that hangs delays no request to stop
        SupervisedProcess(command, environment=environment, log=session.log, grace_s=grace_s) as group,
    ):
        monitor.until_end(group, stop_if_asked)


def _ensure_started_once() -> None:
    if (tasks := step_tasks(os.environ)) > 1:
        raise JobError(
            f"srun starts this command {tasks} times, and each would start ranks of its own. Start it once, by srun "
            "--ntasks=1 with world.processes in the job; or start a script with a Trainer, whose ranks are the tasks"
        )


def _ensure_free(run: Run, on_line: Callable[[str], object], stop_if_asked: Callable[[], object]) -> None:
    ensure_free(run.store)
    ensure_none_elsewhere(run.store, on_line, stop_if_asked)


def _opened(run: Run) -> Run:
    """Return `run`, whose store can be written, with the changes of the fork that it is, if any."""
    with _store_named(run):
        Store.open(run.url, run.job.store_terms).ensure_writable(RUN_FOLDERS, RUN_FILES)
        return as_forked(run)


@contextmanager
def _store_named(run: Run) -> Iterator[None]:
    """Turn errors of an unsafe store in the block into errors that name the job's key."""
    try:
        yield
    except StoreUnsafe as error:
        raise JobError.of(f"job {run.job.name}", [f"snapshots.url: {error}"]) from error


def _begin_attempt(run: Run, ensure: Callable[[], None] | None) -> tuple[Attempt, bytes | None]:
    """Record in the run's folder that another attempt begins, and the job as it is now.

    Args:
        run: to train.
        ensure: checks that no other process trains it; None to take it over.

    Returns:
        The attempt, and the job's document before it, empty if there was none; None if the run was never trained.
    """
    store = run.store
    with _store_named(run), store.errors_explained("written"):
        if ensure is not None:
            ensure()
        recover_orphaned_attempts(run)
        before = run.saved_job() if generations(store) else None
        attempt = run.attempts.begin()
        run.save_job()
    return attempt, before


def _withdraw(run: Run, attempt: Attempt, before: bytes, on_line: Callable[[str], object]) -> bool:
    """Remove the record of a refused command; return whether the store allowed it."""
    try:
        run.restore_job(before)
        run.attempts.withdraw(attempt)
    except Exception as error:  # it is recorded as any other
        on_line(f"the refused attempt {attempt.number} stays in {run.url}: {error}")
        return False
    return True


class _WorldMonitor:
    """Passes on a world's output and events, and collects the record of the attempt."""

    def __init__(
        self,
        session: Session,
        attempt: Attempt,
        watchdog: Watchdog,
        on_line: Callable[[str], object],
        on_event: Callable[[Event], object],
    ) -> None:
        self.attempt = attempt
        self._session, self._watchdog = session, watchdog
        self._hang: Outcome | None = None
        self._code: int | None = None
        self._snapshot_asked = self._ranks_listen = False
        self._announced: deque[str] = deque()
        self._tail = EventTail(session.events)
        self._on_line = on_line
        self._on_event = on_event
        self._process: SupervisedProcess | None = None
        self._lines_at = time.monotonic()

    def snapshot_on_signal(self, number: int, frame: FrameType | None) -> None:
        """Have a snapshot taken; a handler of signals."""
        self._snapshot_asked = True

    def snapshot_on_notice(self, notice: str) -> None:
        """Have a snapshot taken, and say why; called by any thread."""
        self.announce(f"{notice}: a snapshot is taken now; training continues until it is asked to stop")
        self._snapshot_asked = True

    def announce(self, line: str) -> None:
        """Pass on a line of this process with the next lines of the ranks; called by any thread."""
        self._announced.append(line)

    def until_end(self, group: SupervisedProcess, stop_if_asked: Callable[[], object]) -> None:
        """Watch `group` until it ends, or until `stop_if_asked` raises."""
        self._process = group
        # Never a long wait: exceptions raised into this thread must get through.
        while (code := group.wait(_POLL_S)) is None:
            stop_if_asked()
            self._events()
            if time.monotonic() - self._lines_at >= _LINES_EVERY_S:
                self._lines()
                self._check_progress(group)
                if self._snapshot_asked and self._ranks_listen:
                    self._snapshot_asked = False
                    group.ask_for_snapshot()
        self._code = code

    def _check_progress(self, group: SupervisedProcess) -> None:
        """End a world that hangs; report a rank for which the others wait."""
        if slow := self._watchdog.straggler():
            self._take(Event("slow", time.time(), {"rank": slow.rank, "words": str(slow)}))
            self._on_line(str(slow))
        if hang := self._watchdog.hang():
            self._watchdog.write_stacks()
            if not self._watchdog.all_ended():
                self._hang = Outcome.of(WorldError(hang.message()), step=self._watchdog.step())
            group.kill()

    def hand_on_rest(self) -> None:
        """Pass on the last lines and events of a world that has ended."""
        for hand_on in (self._events, self._lines):
            try:
                hand_on()
            except Exception as error:  # it changes no outcome
                log.warning("the last lines of attempt %d cannot be shown: %s", self.attempt.number, error)

    def outcome(self, processes: int, grace_s: float) -> Outcome:
        """Return how the world ended."""
        outcome = self._hang or decide(self._session.outcomes(), self._code, processes)
        if outcome.kind != "died" or outcome.type:
            return outcome
        if self._process is None:
            if (asked := sys.exception()) is None or isinstance(asked, Exception):
                return outcome
            return replace(outcome, kind="stopped", error="asked to stop before a world ran")
        if self._code is not None:
            if not self._session.has_started():
                outcome = not_started(self._code, self._last_lines())
            return replace(outcome, error="\n".join(filter(None, [outcome.error, self._session.fullness()])))
        late = f"asked to stop, and ended when the grace of {grace_s:g} s was over; {outcome.error}"
        return replace(outcome, kind="stopped", error=late)

    def _last_lines(self) -> list[str]:
        log = self._session.log
        printed = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        return without_noise(printed)[-_LAST_LINES:]

    def _lines(self) -> None:
        self._lines_at = time.monotonic()
        while self._announced:
            self._on_line(self._announced.popleft())
        lines = without_noise(self._process.lines()) if self._process else []
        for start in range(0, len(lines), _LINES_AT_ONCE):
            self._on_line("\n".join(lines[start : start + _LINES_AT_ONCE]))

    def _events(self) -> None:
        self._take(*self._tail.new())

    def _take(self, *events: Event) -> None:
        # The attempt log has all of them, also where one cannot be handed on.
        for event in events:
            self.attempt = self.attempt.after(event)
            if event.kind in ("started", "round"):  # a new round of nodes starts its ranks anew
                self._ranks_listen = event.kind == "started"
        for event in events:
            self._on_event(event)


def _record_attempt(
    run: Run,
    attempt: Attempt,
    outcome: Outcome,
    session: Session,
    on_line: Callable[[str], object],
    asked_by: BaseException | None = None,
) -> None:
    """Record the attempt and keep its log; a failing store changes no outcome."""
    try:
        run.attempts.record(attempt, outcome, ending_of(attempt, outcome, asked_by))
        if session.log.exists():
            run.store.write(f"attempts/{attempt.number:06d}.log", session.log.read_bytes()[-_LOG_BYTES:])
        session.remove()
    except Exception as error:
        with suppress(OSError):
            session.keep_unrecorded(outcome, str(error))
        on_line(f"attempt {attempt.number} could not be recorded in {run.url}: {error}; its log: {session.log}")
