"""Report of a run, read from its folder alone, even after its watching processes have ended."""

import csv
import io
import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from midstride.engine.config.job import TrainingJob
from midstride.engine.config.options import MonitorOptions, Record
from midstride.engine.errors import SnapshotError
from midstride.engine.formatting import format_value
from midstride.engine.runs.cause import cause_of
from midstride.engine.runs.run import Run, job_of
from midstride.engine.runs.summary import attempts_of_script, last_sign, newest_snapshot, state_of, why_ended
from midstride.engine.session.attempts import Attempt, AttemptLog
from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.snapshots.metric_rows import join_segments
from midstride.engine.snapshots.parent import parent_of
from midstride.engine.snapshots.weights import best_of, facts_of
from midstride.engine.storage.store import Store

__all__ = [
    "CURVES",
    "MARKDOWN",
    "METRICS_SO_FAR",
    "REPORT",
    "Interruption",
    "Report",
    "Round",
    "metric_log",
    "metric_rows",
    "report_at",
    "report_of",
]

METRICS, MARKDOWN, REPORT, CURVES = "metrics.csv", "report.md", "report.json", "curves.png"
#: the metric log up to the newest snapshot, of a run that is not done
METRICS_SO_FAR = "metrics-so-far.csv"
_RUNS_COMPARED = 100  # a file is read of each
_DEFAULT_CAUSES = {"stopped": "stopped on request", "lost": "its launcher was killed, or it still runs"}


class Interruption(Record):
    """An attempt that did not reach the end, and its cost."""

    attempt: int
    cause: str
    rank: int | None = None
    step: int | None = Field(None, description="Steps taken when it ended, as far as known.")
    resumed_step: int | None = Field(None, description="The step from which the next attempt resumed.")
    steps_lost: int | None = None
    seconds_lost: float | None = Field(None, description="From the end to the first new step.")
    certain: bool = Field(True, description="False when a process was killed: it reports twice a second.")


class Round(Record):
    """Machines that trained together on several nodes."""

    attempt: int
    number: int
    nodes: tuple[str, ...]
    ranks: int
    resumed_from: str | None = None
    why: str = Field("", description="Why the previous round ended; empty for the first.")


class Report(Record):
    """Summary of a run."""

    job: str
    run: str
    url: str
    outcome: Literal["done", "running", "stopped", "user_error", "died", "lost", "new"] = Field(
        description="How the last attempt ended; running where no end has been written: see `time`."
    )
    time: float | None = Field(None, description="The newest sign of life in its folder, in seconds since the epoch.")
    ended_by: str = Field(
        "", description="max_epochs, max_steps, early_stopping, callback, stopped or failed; empty while it runs."
    )
    why: str = Field("", description="Why it ended, as a sentence.")
    error: str = Field("", description="Why it is not done; a user's error starts with their traceback.")
    steps: int = Field(0, description="Taken up to the newest snapshot.")
    epochs: int = 0
    seconds: float = Field(0.0, description="Of all attempts together.")
    snapshots: int = Field(0, description="Taken by the attempts that count.")
    set_aside: dict[str, str] = Field({}, description="Snapshots that are not used again: name -> why.")
    gaps: tuple[str, ...] = Field((), description="Damaged or missing parts of the metric log.")
    failures: tuple[Interruption, ...] = ()
    left_out: tuple[tuple[int, int], ...] = Field(
        (), description="Epoch and batch, from 0, of batches left out because their loss was not finite."
    )
    overridden: dict[str, str] = Field(
        {}, description="Settings that a later attempt requested and the snapshot overrode: setting -> both values."
    )
    slow: tuple[str, ...] = Field((), description="Ranks for which the others had to wait.")
    rounds: tuple[Round, ...] = Field((), description="Machines that trained, if there were several.")
    monitor: str = ""
    best: dict[str, float] = Field({}, description="Values of the best weights.")
    previous: tuple[str, float] | None = Field(None, description="The best of the other runs: its name and value.")
    test: dict[str, float] = Field({}, description="Results of the test of the best weights.")
    parent: str = Field("", description="Of a fork: the run and the step that it starts from.")
    settings: tuple[str, ...] = Field((), description="Of a fork: its changes of the job.")
    files: dict[str, str] = Field({}, description="Name -> where.")

    @property
    def restarts(self) -> int:
        """Number of resumes."""
        return sum(1 for failure in self.failures if failure.resumed_step is not None)


def report_of(run: Run, test: dict[str, float] | None = None) -> Report:
    """Return the report of `run`, with the results of a test if there was one."""
    return _report(run.name, run.store, Store.open(run.job.store_url, run.job.store_terms), run.job, test)


def report_at(store: Store) -> Report:
    """Return the report of the run in `store`, with the test at its end.

    A script's run has no job: its module's name replaces the job's, and no value decides the best run.
    """
    parent, _, name = store.url.rpartition("/")
    return _report(name, store, Store.open(parent, store.options), job_of(store), _tested(store))


def _report(name: str, store: Store, runs: Store, job: TrainingJob | None, test: dict[str, float] | None) -> Report:
    catalog, attempts, rows = SnapshotCatalog(store), AttemptLog(store).attempts(), metric_rows(store)
    last = attempts[-1] if attempts else None
    newest = newest_snapshot(store)
    facts = newest.manifest["facts"] if newest else {}
    progress = facts.get("progress", {})
    monitor = job.monitor if job else None
    best = best_of(store, monitor.metric, monitor.mode) if monitor else facts_of(store, "best")
    state, parent = state_of(store, last, progress), parent_of(store)
    why = why_ended(state, last, progress)
    return Report(
        job=job.name if job else _module_of(facts.get("identity", {})),
        run=name,
        url=store.url,
        outcome=state,  # type: ignore[arg-type]  # validated
        time=last_sign(last, newest),
        ended_by=(last.ended_by if last else progress.get("ended_by", "")) if why else "",
        why=why,
        error=last.error if last and last.outcome != "done" else "",
        steps=progress.get("step", len(rows)),  # the row of the last one may be under way
        epochs=len({row["epoch"] for row in rows}),
        seconds=sum(max(0.0, attempt.ended - attempt.started) for attempt in attempts if attempt.ended),
        snapshots=_snapshots_of(catalog),
        set_aside=catalog.set_aside_reasons(),
        gaps=_gaps(catalog),
        failures=_failures(attempts or attempts_of_script(store, newest)),
        left_out=facts.get("left_out", ()),
        overridden={
            name: f"{format_value(name, found['in_force'])}, not {format_value(name, found['asked'])}"
            for name, found in facts.get("overridden", {}).items()
        },
        slow=tuple(f"attempt {attempt.number}: {line}" for attempt in attempts for line in attempt.slow),
        rounds=tuple(Round(attempt=attempt.number, **fields) for attempt in attempts for fields in attempt.rounds),
        monitor=monitor.metric if monitor else "",
        best=best.get("metrics", {}),
        previous=_previous(runs, name, monitor) if monitor else None,
        test=test or {},
        parent=str(parent) if parent else "",
        settings=parent.changes.settings if parent else (),
        files=_files(store),
    )


def _module_of(identity: dict[str, object]) -> str:
    """Return the path of the module that a Trainer trains; "script" of a loop, with several."""
    module = identity.get("module")
    return module if isinstance(module, str) else "script"


def metric_rows(store: Store) -> list[dict[str, str]]:
    """Return the metric log of a run, finished or not, from its snapshots: one row a step."""
    return list(csv.DictReader(io.StringIO(metric_log(store))))


def metric_log(store: Store) -> str:
    """Return the metric log of a run, finished or not, from its snapshots, as CSV."""
    try:
        return join_segments(SnapshotCatalog(store).rows(faults=[]))
    except SnapshotError:
        return ""  # which of its snapshots count is unknown


def _failures(attempts: Sequence[Attempt]) -> tuple[Interruption, ...]:
    over = attempts[:-1] if attempts and attempts[-1].is_open else attempts
    return tuple(
        _failure(attempt, attempts[number:]) for number, attempt in enumerate(over, 1) if attempt.outcome != "done"
    )


def _failure(attempt: Attempt, later: Sequence[Attempt]) -> Interruption:
    # A fresh start resumes nothing, and is known by its first step.
    taken_up = next((other for other in later if other.generation is not None or other.first_step_at), None)
    new_step_at = next((other.first_step_at for other in later if other.first_step_at), None)
    resumed = None if taken_up is None else taken_up.resumed_step or 0
    ended = attempt.ended
    return Interruption(
        attempt=attempt.number,
        cause=cause_of(attempt.error) or _DEFAULT_CAUSES.get(attempt.outcome, attempt.outcome),
        rank=attempt.rank if attempt.outcome in ("died", "user_error") else None,
        step=attempt.step,
        resumed_step=resumed,
        steps_lost=None if resumed is None or attempt.step is None else max(0, attempt.step - resumed),
        seconds_lost=None if new_step_at is None or ended is None else max(0.0, new_step_at - ended),
        certain=attempt.outcome != "lost" and bool(attempt.type),
    )


def _snapshots_of(catalog: SnapshotCatalog) -> int:
    try:
        return len(catalog.rows(faults=[]))  # one segment for each, pruned ones too
    except SnapshotError:
        return len(catalog.snapshots())


def _gaps(catalog: SnapshotCatalog) -> tuple[str, ...]:
    try:
        return tuple(catalog.log_faults())
    except SnapshotError as error:
        return (str(error),)


def _previous(runs: Store, run: str, monitor: MonitorOptions) -> tuple[str, float] | None:
    """Return the best result of other runs in the store with the same module, if any."""
    module = facts_of(runs.at(run), "best").get("module")
    others = [name for name in runs.list() if name != run][-_RUNS_COMPARED:]
    found = {name: facts_of(runs.at(name), "best") for name in others}
    alike = {name: best for name, best in found.items() if best and best.get("module") == module}
    values = [(name, float(best["metrics"].get(monitor.metric, math.nan))) for name, best in alike.items()]
    choose = min if monitor.mode == "min" else max
    return choose((one for one in values if math.isfinite(one[1])), key=lambda one: one[1], default=None)


def _tested(store: Store) -> dict[str, float]:
    """Return the results of the test of the best weights at the end of the run."""
    try:
        return Report.model_validate_json(store.read(REPORT)).test
    except (FileNotFoundError, ValueError):
        return {}


def _files(store: Store) -> dict[str, str]:
    there = {
        "best weights": ("best", bool(facts_of(store, "best"))),
        "last weights": ("last", bool(facts_of(store, "last"))),
        "metric log": (METRICS, store.exists(METRICS)),
        "metric log so far": (METRICS_SO_FAR, store.exists(METRICS_SO_FAR)),
        "snapshots": ("snapshots", bool(store.list("snapshots"))),
        "report": (MARKDOWN, store.exists(MARKDOWN)),
        "curves": (CURVES, store.exists(CURVES)),
    }
    return {name: f"{store.url}/{path}" for name, (path, is_there) in there.items() if is_there}
