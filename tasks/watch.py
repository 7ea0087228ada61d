"""A world as the orchestrator sees it while it runs: progress, snapshots, logs. Seldom, and never in its way."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, Protocol
from uuid import UUID

from prefect import get_run_logger
from prefect.artifacts import create_progress_artifact, update_progress_artifact

from midstride.engine.events import Event
from midstride.tasks.events import RunResumed, emit
from midstride.tasks.keys import artifact_key
from midstride.tasks.snapshot import record_snapshot

__all__ = ["View", "Watch", "say", "shown_by"]

PROGRESS_EVERY_S = 2.0
SNAPSHOTS_EVERY_S = 10.0


class View(Protocol):
    """Who else wants to see the world: a terminal."""

    def begin(self, url: str) -> object:
        """A world of the run at `url` is about to start."""

    def line(self, text: str) -> object:
        """Show lines the world printed."""

    def event(self, event: Event) -> object:
        """Show one event."""


_view: ContextVar[View | None] = ContextVar("midstride_view", default=None)


@contextmanager
def shown_by(view: View) -> Iterator[None]:
    """Show the worlds launched within, in this thread, by `view` as well."""
    token = _view.set(view)
    try:
        yield
    finally:
        _view.reset(token)


def say(text: str) -> None:
    """Tell whoever follows the run something they should know."""
    get_run_logger().warning("%s", text)
    if view := _view.get():
        view.line(text)


class Watch:
    """Hands a world's lines and events on to Prefect and to the view, if there is one.

    Args:
        url: of the run.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._view = _view.get()
        self._log = get_run_logger()
        self._artifact: UUID | None = None
        self._progress_at = self._snapshots_at = float("-inf")
        self._percent = -1.0
        self._taken: list[dict[str, Any]] = []
        if self._view:
            self._view.begin(url)

    def line(self, text: str) -> None:
        """Log lines of the world; they come in batches."""
        self._log.info("%s", text)
        if self._view:
            self._view.line(text)

    def event(self, event: Event) -> None:
        """Take note of one event."""
        if self._view:
            self._view.event(event)
        if event.kind == "step":
            self._try(self._progress, event.fields)
        elif event.kind == "snapshot":
            self._taken.append(event.fields)
        elif event.kind == "resumed" and event.fields.get("resumed_from"):
            self._log.info("resumed from snapshot %(resumed_from)s, step %(step)s", event.fields)
            self._try(self._resumed, **event.fields)
        if self._taken and time.monotonic() - self._snapshots_at >= SNAPSHOTS_EVERY_S:
            self._try(self._record)

    def close(self) -> None:
        """Record what is left."""
        if self._taken:
            self._try(self._record)

    def _progress(self, fields: dict[str, Any]) -> None:
        total, now = fields.get("steps_total"), time.monotonic()
        if not total or now - self._progress_at < PROGRESS_EVERY_S:
            return
        self._progress_at = now
        percent = min(100.0, 100.0 * fields["step"] / total)
        if self._artifact is None:
            words = f"Training of {self._url}, {total} steps"
            created = create_progress_artifact(percent, artifact_key(self._url, "progress"), words)
            assert isinstance(created, UUID)  # and not a coroutine: no event loop runs here
            self._artifact = created
        elif percent != self._percent:
            update_progress_artifact(self._artifact, progress=percent)
        self._percent = percent

    def _resumed(self, generation: int, resumed_from: str, step: int, **others: Any) -> None:
        emit(RunResumed(run=self._url, generation=generation, snapshot=resumed_from, step=step))

    def _record(self) -> None:
        self._snapshots_at = time.monotonic()
        taken, self._taken = self._taken, []
        # As a state: a snapshot found damaged is a red mark on the run, and for the next resume to deal with.
        record_snapshot(self._url, taken[-1]["step"], taken, return_state=True)

    def _try(self, part: Callable[..., object], *arguments: Any, **named: Any) -> None:
        """Do `part`; an orchestrator that does not answer is no reason to stop training."""
        with _uninterrupted():
            try:
                part(*arguments, **named)
            except Exception as error:
                self._log.warning("Prefect took no note of the run's progress: %s", error)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold a request to stop back until the block ends; asked again, give in at once.

    A signal's exception that is raised inside Prefect's client comes out of it as another one, and the
    request would be lost.
    """
    held: list[int] = []
    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            handlers[number](number, frame)
        held.append(number)

    if threading.current_thread() is threading.main_thread():
        for asked in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            handler = signal.getsignal(asked)
            if callable(handler):
                handlers[asked] = handler
                signal.signal(asked, hold)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if held:
        handlers[held[0]](held[0], None)
