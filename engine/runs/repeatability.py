"""Two executions of the first steps of a job, compared: which operation is not repeatable."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midstride.engine.checkpointing.determinism import repeatable_form
from midstride.engine.config.job import TrainingJob
from midstride.engine.config.options import SnapshotOptions
from midstride.engine.errors import EngineError
from midstride.engine.runs.replay import Launch, quiet_copy, replay_environment
from midstride.engine.runs.run_difference import Cause, first_cause
from midstride.engine.session.replay_plan import TRACE, ReplayPlan

__all__ = ["Unrepeatable", "unrepeatable"]

#: steps that are executed twice
_STEPS = 2

Trace = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Unrepeatable:
    """The first difference of two executions of a job's first steps.

    Args:
        cause: the first value that differs.
        operation: the first operation that gives other bits for the same arguments, with its place; "" if none does.
        outside: an operation whose arguments differ, although no operation has computed them; "" without one.
        instead: a repeatable form of the operation; "" if none is known.
    """

    cause: Cause
    operation: str = ""
    outside: str = ""
    instead: str = ""

    def __str__(self) -> str:
        lines = [f"two executions of the first steps differ: {self.cause}"]
        if self.operation:
            lines.append(f"first operation with other bits for the same arguments: {self.operation}")
        elif self.outside:
            lines.append(f"first value from outside, such as a clock or an unseeded generator: {self.outside}")
        return "\n  ".join([*lines, *([self.instead] if self.instead else [])])


def unrepeatable(job: TrainingJob, launch: Launch) -> Unrepeatable | None:
    """Execute the first steps of `job` twice; return their first difference, if any.

    Raises:
        EngineError: an execution ended before these steps.
    """
    steps = min(_STEPS, job.trainer.max_steps or _STEPS)
    ours, theirs = (_executed(job, steps, launch) for _ in range(2))
    if (cause := first_cause(ours, theirs)) is None:
        return None
    rank = cause.rank
    operation, outside = _first_operation(ours[rank], theirs[rank])
    return Unrepeatable(cause, operation, outside, repeatable_form(operation.partition(" ")[0]) if operation else "")


def _executed(job: TrainingJob, steps: int, launch: Launch) -> Sequence[Trace]:
    if job.snapshots is None:  # without them, nothing makes torch deterministic
        trainer = job.trainer.model_copy(update={"deterministic": bool(job.trainer.deterministic)})
        job = job.model_copy(update={"snapshots": SnapshotOptions.model_validate({}), "trainer": trainer})
    with tempfile.TemporaryDirectory(prefix="midstride-check-") as folder:
        plan = ReplayPlan(folder, steps, trace=True, operations=True)
        with replay_environment(plan):
            outcome = launch(quiet_copy(job, "check", folder))
        files = sorted(Path(folder).glob(TRACE.format(rank="*")))
        if len(files) < job.world.ranks:
            raise EngineError(outcome.error or f"{job.name} ends before step {steps}")
        return [json.loads(file.read_text()) for file in files]


def _first_operation(ours: Trace, theirs: Trace) -> tuple[str, str]:
    """Return the first operation that is not repeatable, or has arguments from outside."""
    for mine, other in zip(ours, theirs, strict=False):
        pairs = zip(mine.get("operations", ()), other.get("operations", ()), strict=False)
        for (name, given, returned, line), (_, their_given, their_returned, _) in pairs:
            if given != their_given:
                return "", f"{name} at {line}"
            if returned != their_returned:
                return f"{name} at {line}", ""
    return "", ""
