"""Reports a running world to Prefect: progress, snapshots, logs. Errors do not stop the run."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Protocol

from prefect import get_client, get_run_logger
from prefect.exceptions import Pause
from prefect.transactions import CommitMode, transaction

from midstride.engine.runs.run import Run
from midstride.engine.session.events import Event
from midstride.tasks.events import RoundBegun, RunResumed, StoreAwaited, emit
from midstride.tasks.progress import Progress
from midstride.tasks.run_page import show_progress_page
from midstride.tasks.snapshot import record_snapshot
from midstride.tasks.stop_requests import stop_delayed
from midstride.tasks.validations import Validations
from midstride.tasks.without_retries import without_retries

__all__ = ["RunMonitor", "View", "view_for", "warn"]

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
                    warn(f"Prefect's server takes no note of the run for now, and training continues: {error}")
                return
        self._silent_until = _NEVER
        if self._is_away:
            self._is_away = False
            warn("Prefect's server takes note of the run again")
