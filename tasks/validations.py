"""Results of a validation in a line of the run's log."""

import math
from typing import Any

from midstride.engine.config.options import MonitorOptions
from midstride.engine.formatting import format_number
from midstride.engine.runs.run import Run
from midstride.engine.session.events import Event
from midstride.engine.snapshots.weights import best_of

__all__ = ["Validations"]


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
