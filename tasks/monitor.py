"""Reports a running world to Prefect: progress, snapshots, logs. Errors do not stop the run."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Protocol
from uuid import UUID

from prefect import get_client, get_run_logger, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import Pause
from prefect.transactions import CommitMode, transaction

from midstride.engine.config.options import MonitorOptions
from midstride.engine.formatting import format_number, format_seconds
from midstride.engine.runs.run import Run
from midstride.engine.session.events import Event
from midstride.engine.snapshots.inspection import check_announced
from midstride.engine.snapshots.weights import best_of
from midstride.tasks.events import RoundBegun, RunResumed, SnapshotCommitted, StoreAwaited, emit
from midstride.tasks.resources import artifact_key
from midstride.tasks.run_page import show_progress_page
from midstride.tasks.stop_requests import stop_delayed
from midstride.tasks.without_retries import without_retries

__all__ = ["RunMonitor", "Validations", "view_for", "warn"]

SNAPSHOTS_EVERY_S = 10.0
PAGE_EVERY_S = 30.0
WAITING_EVERY_S = 30.0
#: seconds without calls of Prefect after one that failed
SILENCE_S = 5.0
_TABLE_ROWS = 100
_NEVER = float("-inf")


class View(Protocol):
    """Shows a world beside Prefect, for example on a terminal."""

    def begin(self, url: str) -> object:
        """A world of the run at `url` is about to start."""

    def line(self, text: str) -> object:
        """Show lines the world printed."""

    def event(self, event: Event) -> object:
        """Show one event."""


_view: ContextVar[View | None] = ContextVar("midstride_view", default=None)


@contextmanager
def view_for(view: View) -> Iterator[None]:
    """Show the worlds launched within, in this thread, by `view` as well."""
    token = _view.set(view)
    try:
        yield
    finally:
        _view.reset(token)


def warn(text: str) -> None:
    """Warn on the page of the run, and on the terminal if the run is shown there."""
    get_run_logger().warning("%s", text)
    if view := _view.get():
        view.line(text)


class RunMonitor:
    """Passes the lines and events of a world on to Prefect, and to the view if there is one.

    Args:
        run: the run that the world trains.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._url = run, run.url
        self._view = _view.get()
        self._log = get_run_logger()
        self._progress = Progress(run.url)
        self._validations = Validations.of(run)
        self._page_at = time.monotonic()
        self._snapshots_at = self._waiting_at = self._silent_until = _NEVER
        self._is_away = False
        self._taken: list[dict[str, Any]] = []
        self._recorded: list[dict[str, Any]] = []
        if self._view:
            self._view.begin(run.url)

    def __enter__(self) -> "RunMonitor":
        """Return the monitor."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Record the rest, also of a stopped or dead world."""
        self._silent_until = _NEVER  # ask in any case
        if self._taken:
            self._try(self._record)
        if self._recorded:
            self._try(self._show_page)
        self._try(self._progress.close)

    def line(self, text: str) -> None:
        """Log lines of the world; they come in batches."""
        self._log.info("%s", text)
        if self._view:
            self._view.line(text)

    def event(self, event: Event) -> None:
        """Take note of one event."""
        if self._view:
            self._view.event(event)
        if event.kind == "snapshot":
            self._taken.append({**event.fields, "time": event.time})
        elif event.kind == "validation":
            self._log.info("%s", self._validations.line(event))
        elif event.kind == "resumed" and event.fields.get("resumed_from"):
            self._log.info("resumed from snapshot %(resumed_from)s, step %(step)s", event.fields)
        if event.kind in ("waiting", "round", "resumed"):
            self._try(lambda: self._tell(event))
        self._progress.follow(event)
        if self._progress.is_due:
            self._try(self._progress.show)
        if self._taken and time.monotonic() - self._snapshots_at >= SNAPSHOTS_EVERY_S:
            self._try(self._record)

    def _tell(self, event: Event) -> None:
        """Emit the event for automations."""
        if event.kind == "waiting":
            self._waiting(event.fields)
        elif event.kind == "round":
            emit(RoundBegun(run=self._url, **event.fields))
        elif event.kind == "resumed" and event.fields.get("resumed_from"):
            self._resumed(**event.fields)

    def _resumed(self, generation: int, resumed_from: str, step: int, **others: Any) -> None:
        emit(RunResumed(run=self._url, generation=generation, snapshot=resumed_from, step=step))

    def _waiting(self, fields: dict[str, Any]) -> None:
        """Let automations know of a store that is waited for."""
        if time.monotonic() - self._waiting_at >= WAITING_EVERY_S:
            self._waiting_at = time.monotonic()
            emit(StoreAwaited(run=self._url, **fields))

    def _record(self) -> None:
        with get_client(sync_client=True) as client:
            client.hello()  # a server that is gone for a while is no fault of the snapshots: they wait for it
        self._snapshots_at = time.monotonic()
        taken, self._taken = self._taken, []
        # Committed at once: when the world dies, its task is rolled back with all its children, but no snapshot is.
        with transaction(commit_mode=CommitMode.EAGER):
            # As a state: a snapshot found damaged is a red mark on the run, and for the next resume to deal with.
            state = record_snapshot(self._url, taken[-1]["step"], taken, return_state=True)
        if state.is_completed():
            self._recorded = [*state.result(), *self._recorded][:_TABLE_ROWS]
        if time.monotonic() - self._page_at >= PAGE_EVERY_S:
            self._show_page()

    def _show_page(self) -> None:
        show_progress_page(self._run, self._recorded)
        self._page_at = time.monotonic()

    def _try(self, act: Callable[[], object]) -> None:
        """Call `act`. If Prefect does not answer, say so once and pause calls. Training continues."""
        if time.monotonic() < self._silent_until:
            return
        with stop_delayed(), without_retries():
            try:
                act()
            except Pause:  # a paused flow starts no task; `stop_if_asked` tells the launcher
                return
            except Exception as error:
                self._silent_until = time.monotonic() + SILENCE_S
                if not self._is_away:
                    self._is_away = True
                    warn(f"Prefect's server does not record the run for now; training continues: {error}")
                return
        self._silent_until = _NEVER
        if self._is_away:
            self._is_away = False
            warn("Prefect's server records the run again")


PROGRESS_EVERY_S = 2.0


class Progress:
    """A progress artifact that follows one world.

    Args:
        url: of the run.
    """

    def __init__(self, url: str) -> None:
        self._key = artifact_key(url, "progress")
        self._artifact: UUID | None = None
        self._shown_at = float("-inf")
        self._shown = self._now = (0.0, "")
        self._resumed = self._metrics = self._step = self._nodes = ""
        self._over = False

    @property
    def is_due(self) -> bool:
        """Whether there is something new to show, and the last call of Prefect is long enough ago."""
        return self._now != self._shown and time.monotonic() - self._shown_at >= PROGRESS_EVERY_S

    def follow(self, event: Event) -> None:
        """Take note of one event."""
        fields = event.fields
        if event.kind == "resumed" and fields.get("resumed_from"):
            self._resumed = f"resumed at step {fields['step']:,}"
        elif event.kind == "round":
            self._nodes = f"round {fields['number']} on {', '.join(fields['nodes'])}"
        elif event.kind == "validation":
            self._metrics = ", ".join(f"{name} {format_number(value)}" for name, value in fields["metrics"].items())
        elif event.kind == "step":
            self._step = f"step {fields['step']:,}"
            self._now = _percent(fields), self._sentence(*_progress_lines(fields))
        elif event.kind == "finished":
            self._over = True
            self._now = 100.0, self._sentence(f"done, {fields['step']:,} steps")

    def show(self) -> None:
        """Show how far it is: one call of Prefect, of 20 ms."""
        self._shown_at = time.monotonic()
        percent, text = self._now
        if self._artifact is None:
            created = create_progress_artifact(percent, self._key, text)
            assert isinstance(created, UUID)  # and not a coroutine: no event loop runs here
            self._artifact = created
        else:
            update_progress_artifact(self._artifact, progress=percent, description=text)
        self._shown = percent, text

    def close(self) -> None:
        """Show where the world ended."""
        if self._step and not self._over:
            self._now = self._now[0], self._sentence(f"ended after {self._step}")
        if self._now != self._shown:
            self.show()

    def _sentence(self, *clauses: str) -> str:
        return "; ".join(filter(None, [", ".join(clauses), self._metrics, self._resumed, self._nodes]))


def _percent(fields: dict[str, Any]) -> float:
    total = fields.get("steps_total")
    return min(100.0, 100.0 * fields["step"] / total) if total else 0.0  # data without a length end when they end


def _progress_lines(fields: dict[str, Any]) -> list[str]:
    step, total, rate = fields["step"], fields.get("steps_total"), fields["rate"]
    lines = [f"epoch {fields['epoch']}", f"step {step:,} of {total:,}" if total else f"step {step:,}"]
    lines.append(f"{format_number(rate)} steps/s")
    return [*lines, f"{format_seconds((total - step) / rate)} left"] if total and rate else lines


class Validations:
    """The validations of one world.

    Args:
        monitor: the deciding value, if any.
        best: best value of the previous attempts, and its step; None without one.
    """

    def __init__(self, monitor: MonitorOptions | None, best: tuple[float, int] | None = None) -> None:
        self._monitor = monitor
        self._best = best

    @classmethod
    def of(cls, run: Run) -> "Validations":
        """Return those of another world of `run`.

        Raises:
            SnapshotError: the store cannot be read.
        """
        monitor = run.job.monitor
        if monitor is None:
            return cls(None)
        with run.store.errors_explained("read"):
            weights = best_of(run.store, monitor.metric, monitor.mode)
        value = weights.get("metrics", {}).get(monitor.metric)
        return cls(monitor, None if value is None else (float(value), int(weights["step"])))

    def line(self, event: Event) -> str:
        """Return the results of `event`, and the best ones of the run so far.

        >>> validations = Validations(MonitorOptions(metric="val/loss", mode="min"))
        >>> validations.line(Event("validation", 0.0, {"step": 38, "epoch": 0, "metrics": {"val/loss": 0.5}}))
        'validation at step 38, epoch 0: val/loss 0.5 (best so far)'
        >>> validations.line(Event("validation", 0.0, {"step": 76, "epoch": 1, "metrics": {"val/loss": 0.75}}))
        'validation at step 76, epoch 1: val/loss 0.75 (best so far: 0.5 at step 38)'
        """
        fields = event.fields
        values = ", ".join(f"{name} {format_number(value)}" for name, value in fields["metrics"].items())
        return f"validation at step {fields['step']:,}, epoch {fields['epoch']}: {values}{self._compared(fields)}"

    def _compared(self, fields: dict[str, Any]) -> str:
        monitor = self._monitor
        value = math.nan if monitor is None else fields["metrics"].get(monitor.metric, math.nan)
        if monitor is None or not math.isfinite(value):
            return ""
        sign, now = 1 if monitor.mode == "min" else -1, (value, fields["step"])
        # Results of an attempt that died before its next snapshot come again.
        if self._best is None or sign * value < sign * self._best[0] or self._best[1] > now[1] or self._best == now:
            self._best = now
            return " (best so far)"
        best, step = self._best
        return f" (best so far: {format_number(best)} at step {step:,})"


@task(name="record snapshot", task_run_name="snapshot at step {step}", cache_policy=NO_CACHE)
def record_snapshot(url: str, step: int, taken: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check the newly `taken` snapshots, and emit events.

    Args:
        url: of the run.
        step: of the newest of them.
        taken: one dict for each, with time, name, step, epoch, bytes and stall_s, as in the engine's events.

    Returns:
        The snapshots taken, each with its findings as "state", newest first.

    Raises:
        SnapshotDamaged: a committed snapshot is damaged.
    """
    checked = check_announced(url, taken)[::-1]
    for row in reversed(checked):
        emit(SnapshotCommitted(run=url, **row))
    return checked
