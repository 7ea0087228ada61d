"""The report of a run, read from its folder alone: right also when the processes that watched the run are gone."""

import csv
import io
import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from midstride.engine.config.job import TrainingJob
from midstride.engine.config.options import Options
from midstride.engine.errors import SnapshotError
from midstride.engine.runs.run import Run
from midstride.engine.session.attempts import Attempt
from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.snapshots.rows import join_segments
from midstride.engine.snapshots.weights_index import metrics_of
from midstride.engine.storage.store import Store

__all__ = ["Failure", "Report", "metric_rows", "report_of", "summarize_error"]

METRICS = "metrics.csv"
_RUNS_COMPARED = 100  # a file is read of each
_UNSAID = {"stopped": "stopped on request", "lost": "its launcher was killed"}


class Failure(Options):
    """One attempt that did not reach the end, and what it cost."""

    attempt: int
    cause: str
    rank: int | None = None
    step: int | None = Field(None, description="Steps taken when it ended, as far as known.")
    resumed_step: int | None = Field(None, description="The step from which the next attempt went on.")
    steps_lost: int | None = None
    seconds_lost: float | None = Field(None, description="From the end to the first new step.")
    certain: bool = Field(True, description="False when a process was killed: it reports twice a second.")


class Report(Options):
    """What a run came to."""

    job: str
    run: str
    url: str
    outcome: Literal["done", "stopped", "user_error", "died", "lost", "new"]
    error: str = Field("", description="Why it is not done; a user's error starts with their traceback.")
    steps: int = 0
    epochs: int = 0
    seconds: float = Field(0.0, description="Of all attempts together.")
    snapshots: int = Field(0, description="Taken by the attempts that count.")
    set_aside: dict[str, str] = Field({}, description="Snapshots that are not used again: name -> why.")
    gaps: tuple[str, ...] = Field((), description="What of the metric log is damaged or missing.")
    failures: tuple[Failure, ...] = ()
    left_out: tuple[tuple[int, int], ...] = Field(
        (), description="Epoch and batch, from 0, of what was left out because its loss was not finite."
    )
    overridden: dict[str, str] = Field(
        {}, description="What a later life asked for, and what the snapshot brought along instead: setting -> both."
    )
    slow: tuple[str, ...] = Field((), description="Ranks for which the others had to wait.")
    monitor: str = ""
    best: dict[str, float] = Field({}, description="What the best weights reached.")
    previous: tuple[str, float] | None = Field(None, description="The best of the other runs: its name and value.")
    test: dict[str, float] = Field({}, description="What a test of the best weights gave.")
    files: dict[str, str] = Field({}, description="Name -> where.")

    @property
    def restarts(self) -> int:
        """How often the run was taken up again."""
        return sum(1 for failure in self.failures if failure.resumed_step is not None)


def report_of(run: Run, test: dict[str, float] | None = None) -> Report:
    """Return the report of `run`, with the results of a test if there was one."""
    job, store, catalog = run.job, run.store, run.catalog
    attempts, rows = run.attempts.attempts(), metric_rows(run.store)
    last = attempts[-1] if attempts else None
    facts = _facts(catalog)
    return Report(
        job=job.name,
        run=run.name,
        url=run.url,
        outcome=last.outcome if last else "new",  # type: ignore[arg-type]  # validated
        error=last.error if last and last.outcome != "done" else "",
        steps=len(rows),
        epochs=len({row["epoch"] for row in rows}),
        seconds=sum(attempt.ended - attempt.started for attempt in attempts if attempt.ended),
        snapshots=_taken(catalog),
        set_aside=dict(catalog.aside()),
        gaps=_gaps(catalog),
        failures=_failures(attempts),
        left_out=facts.get("left_out", ()),
        overridden={
            name: f"{found['in_force']!r}, not {found['asked']!r}"
            for name, found in facts.get("overridden", {}).items()
        },
        slow=tuple(f"attempt {attempt.number}: {words}" for attempt in attempts for words in attempt.slow),
        monitor=job.monitor.metric if job.monitor else "",
        best=metrics_of(store, "best").get("metrics", {}),
        previous=_previous(job, run.name),
        test=test or {},
        files=_files(store),
    )


def metric_rows(store: Store) -> list[dict[str, str]]:
    """Return the metric log of a run, finished or not, from its snapshots: one row a step."""
    try:
        text = join_segments(SnapshotCatalog(store).rows(faults=[]))
    except SnapshotError:
        text = ""  # which of its snapshots count is unknown
    return list(csv.DictReader(io.StringIO(text)))


def _failures(attempts: Sequence[Attempt]) -> tuple[Failure, ...]:
    return tuple(
        _failure(attempt, attempts[place + 1 :]) for place, attempt in enumerate(attempts) if attempt.outcome != "done"
    )


def _failure(attempt: Attempt, later: Sequence[Attempt]) -> Failure:
    # A fresh start resumes nothing, and is known by its first step.
    taken_up = next((other for other in later if other.generation is not None or other.first_step_at), None)
    new_step_at = next((other.first_step_at for other in later if other.first_step_at), None)
    resumed = None if taken_up is None else taken_up.resumed_step or 0
    ended = attempt.ended
    return Failure(
        attempt=attempt.number,
        cause=summarize_error(attempt.error) or _UNSAID.get(attempt.outcome, attempt.outcome),
        rank=attempt.rank if attempt.outcome in ("died", "user_error") else None,
        step=attempt.step,
        resumed_step=resumed,
        steps_lost=None if resumed is None or attempt.step is None else max(0, attempt.step - resumed),
        seconds_lost=None if new_step_at is None or ended is None else max(0.0, new_step_at - ended),
        certain=attempt.outcome != "lost" and bool(attempt.type),
    )


def summarize_error(error: str) -> str:
    r"""Return an error in one line: of a traceback the exception itself, of our own words the first line.

    >>> summarize_error("Traceback (most recent call last):\n  File ...\nValueError: 3 is odd\nraised in training_step")
    'ValueError: 3 is odd'
    """
    lines = [line for line in error.strip().splitlines() if line.strip()]
    if not lines:
        return ""
    if not lines[0].startswith("Traceback"):
        return lines[0]
    return next((line for line in reversed(lines) if ":" in line and not line.startswith(" ")), lines[-1])


def _facts(catalog: SnapshotCatalog) -> dict[str, Any]:
    snapshots = catalog.snapshots()
    return dict(snapshots[-1].manifest["facts"]) if snapshots else {}


def _taken(catalog: SnapshotCatalog) -> int:
    try:
        return len(catalog.rows(faults=[]))  # one segment for each, pruned ones too
    except SnapshotError:
        return len(catalog.snapshots())


def _gaps(catalog: SnapshotCatalog) -> tuple[str, ...]:
    try:
        return tuple(catalog.log_faults())
    except SnapshotError as error:
        return (str(error),)


def _previous(job: TrainingJob, run: str) -> tuple[str, float] | None:
    """Return the best of what other runs in the same store reached with the same module, if there are any."""
    if job.monitor is None:
        return None
    store, metric = Store.open(job.store_url), job.monitor.metric
    module = metrics_of(store.at(run), "best").get("facts", {}).get("module")
    others = [name for name in store.list() if name != run][-_RUNS_COMPARED:]
    found = {name: metrics_of(store.at(name), "best") for name in others}
    alike = {name: best for name, best in found.items() if best and best["facts"].get("module") == module}
    values = [(name, float(best["metrics"].get(metric, math.nan))) for name, best in alike.items()]
    choose = min if job.monitor.mode == "min" else max
    return choose((one for one in values if math.isfinite(one[1])), key=lambda one: one[1], default=None)


def _files(store: Store) -> dict[str, str]:
    there = {
        "best weights": ("best", bool(metrics_of(store, "best"))),
        "last weights": ("last", bool(metrics_of(store, "last"))),
        "metric log": (METRICS, store.exists(METRICS)),
        "snapshots": ("snapshots", bool(store.list("snapshots"))),
    }
    return {name: f"{store.url}/{path}" for name, (path, is_there) in there.items() if is_there}
