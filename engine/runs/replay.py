"""Replays: steps of a run, computed again in a temporary fork. Needs no torch."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from midstride.engine.config.job import TrainingJob
from midstride.engine.config.options import SnapshotOptions
from midstride.engine.errors import UserError
from midstride.engine.runs.replayed_rows import RowDifference, first_difference, parse_rows
from midstride.engine.runs.run import Run, run_at
from midstride.engine.runs.run_report import metric_rows
from midstride.engine.session.replay_plan import NEVER, RESULT, ReplayPlan
from midstride.engine.snapshots.catalog import Snapshot, SnapshotCatalog
from midstride.engine.snapshots.forks import fork
from midstride.engine.storage.store import Store

__all__ = ["Replayed", "changes_between", "ensure_exists", "replay_environment", "replay_folder", "replay_run"]

#: trains a run; returns how it ended, with `kind`, `error` and `code`
Launch = Callable[[Run], Any]


@dataclass(frozen=True)
class Replayed:
    """A replay of some steps, and the first difference from the run.

    Args:
        url: of the run.
        snapshot: the one that the replay started from; "" from the start.
        first: first replayed step.
        last: last one that was completed.
        difference: the first value that differs; None if all rows are equal.
        compared: number of rows that the run has, too.
        page: the last step as JSON values.
        error: the error that ended the replay before its last step.
        changed: changes of versions and code since the run.
    """

    url: str
    snapshot: str
    first: int
    last: int
    difference: RowDifference | None = None
    compared: int = 0
    page: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    changed: tuple[str, ...] = ()


def ensure_exists(run: Run, step: int) -> None:
    """Refuse a step that the run has not, and never will have.

    Raises:
        UserError: the run is done, and has fewer steps; or the step is less than 1.
    """
    newest = SnapshotCatalog(run.store).snapshots()[-1:]
    progress = newest[0].manifest["facts"].get("progress", {}) if newest else {}
    last = progress.get("step", 0) if progress.get("finished") else None
    if step < 1 or (last is not None and step > last):
        has = "its steps count from 1" if last is None else f"it has steps 1 to {last}"
        raise UserError(f"{run.url} has no step {step}: {has}")


@contextmanager
def replay_folder(url: str, snapshot: Snapshot | None) -> Iterator[tuple[Run, str]]:
    """Give a temporary fork of the run at `url` from `snapshot`, and a folder for results.

    Without a snapshot, the fork is a new run of the same job. It takes no snapshots and reports to no tracker.
    """
    run = run_at(url)
    _ensure_same_size(run.job, snapshot)
    with tempfile.TemporaryDirectory(prefix="midstride-replay-") as folder:
        if snapshot is not None:
            fork(run.store, snapshot, Store.open(f"{folder}/{run.name}"), is_temporary=True)
        options = run.job.snapshots or SnapshotOptions.model_validate({})
        never = {"url": folder, "every_steps": NEVER, "every_seconds": None, "overhead": None, "keep": NEVER}
        changed = {
            "snapshots": options.model_copy(update=never),
            "loggers": (),
            "trainer": run.job.trainer.model_copy(update={"enable_progress_bar": False}),
        }
        yield Run(run.job.model_copy(update=changed), run.name), folder


def _ensure_same_size(job: TrainingJob, snapshot: Snapshot | None) -> None:
    was = job.world.ranks if snapshot is None else snapshot.manifest["world_size"]
    if job.world.lanes is None and was != job.world.ranks:
        raise UserError(
            f"snapshot {snapshot.name if snapshot else ''} was taken by {was} ranks, and the job has "
            f"{job.world.ranks}: sums differ in their last bits, so a replay would differ as well"
        )


def replay_run(url: str, snapshot: Snapshot | None, plan: ReplayPlan, launch: Launch) -> Replayed:
    """Compute the steps after `snapshot` again, and compare their rows with those of the run.

    Args:
        url: of the run, which does not change.
        snapshot: where to start; None for the start of the run.
        plan: its folder is chosen here.
        launch: trains a run.
    """
    first = snapshot.position.step + 1 if snapshot else 1
    with replay_folder(url, snapshot) as (run, folder), replay_environment(replace(plan, folder=folder)):
        outcome = launch(run)
        path = Path(folder, RESULT)
        is_over = path.exists()
        result: dict[str, Any] = json.loads(path.read_text()) if is_over else {"rows": "", "page": {}}
        changed = changes_between(run_at(url).store, run.store)
    source = run_at(url)
    rows, expected = parse_rows(result["rows"]), metric_rows(source.store)
    mine = [row for row in rows if int(row["step"]) >= first]
    known = {row["step"] for row in expected}
    error = "" if is_over else outcome.error or f"the run ended before step {plan.until}"
    return Replayed(
        source.url,
        snapshot.name if snapshot else "",
        first,
        max((int(row["step"]) for row in mine), default=first - 1),
        first_difference(expected, mine, plan.until),
        sum(row["step"] in known for row in mine),
        result["page"],
        error,
        changed,
    )


@contextmanager
def replay_environment(plan: ReplayPlan) -> Iterator[None]:
    """Let processes that start in the block follow `plan`."""
    os.environ.update(plan.environment)
    try:
        yield
    finally:
        for name in plan.environment:
            os.environ.pop(name, None)


def changes_between(before: Store, now: Store) -> tuple[str, ...]:
    """Return the versions, the hardware and the code that differ between two runs' records."""
    found = []
    for store in (before, now):
        try:
            found.append(json.loads(store.read("run.json")).get("bits", {}))
        except (FileNotFoundError, ValueError):
            return ()
    was, is_now = found
    lines = [
        f"{name} was {was.get(name)}, and is {value}"
        for name, value in is_now.items()
        if name != "source" and was.get(name) != value
    ]
    code = is_now.get("source", {}).items()
    return (*lines, *(f"{name} has changed" for name, digest in code if was.get("source", {}).get(name) != digest))
