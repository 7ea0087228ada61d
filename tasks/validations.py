"""What a validation found, in a line for the run's log."""

import math
from typing import Any

from midstride.engine.config.options import MonitorOptions
from midstride.engine.formatting import format_number
from midstride.engine.session.events import Event

__all__ = ["Validations"]


class Validations:
    """The validations of one world.

    Args:
        monitor: which value decides what is best; none if empty.
    """

    def __init__(self, monitor: MonitorOptions | None) -> None:
        self._monitor = monitor
        self._best: tuple[float, int] | None = None

    def line(self, event: Event) -> str:
        """Return what `event` found, and the best of this world so far.

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
        sign = 1 if monitor.mode == "min" else -1
        if self._best is None or sign * value < sign * self._best[0]:
            self._best = value, fields["step"]
            return " (best so far)"
        best, step = self._best
        return f" (best so far: {format_number(best)} at step {step:,})"
