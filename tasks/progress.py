"""Progress of a world on the run's page in the UI: a bar and a line of text."""

import time
from typing import Any
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact

from midstride.engine.formatting import format_number, format_seconds
from midstride.engine.session.events import Event
from midstride.tasks.resources import artifact_key

__all__ = ["Progress"]

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
