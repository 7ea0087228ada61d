"""Replays: steps of a run, computed again in a temporary fork. Needs no torch."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from midstride.engine.config.job import IDENTITY_KEYS, TrainingJob
from midstride.engine.config.options import SnapshotOptions
from midstride.engine.errors import UserError
from midstride.engine.runs.replayed_rows import RowDifference, first_difference, parse_rows
from midstride.engine.runs.run import Run, run_at
from midstride.engine.runs.run_report import metric_rows
from midstride.engine.session.replay_plan import NEVER, RESULT, ReplayPlan, recorded_changes
from midstride.engine.snapshots.catalog import Snapshot, SnapshotCatalog
from midstride.engine.snapshots.forks import fork
from midstride.engine.snapshots.lease import lease_path, newest
from midstride.engine.snapshots.parent import ForkedStore, inherits
from midstride.engine.snapshots.position import parse_name
from midstride.engine.storage.store import Store

__all__ = [
    "Replayed",
    "changes_between",
    "ensure_exists",
    "quiet_copy",
    "replay_environment",
    "replay_folder",
    "replay_run",
    "started_from",
]

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
        damaged: why newer snapshots before the step were left out, by name.
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
    damaged: dict[str, str] = field(default_factory=dict)


def ensure_exists(run: Run, step: int) -> None:
    """Refuse a step that the run has not, and never will have.

    Raises:
        UserError: the run is done, and has fewer steps; or the step is less than 1.
    """
    newest = SnapshotCatalog(run.store).newest_readable()
    progress = newest.manifest["facts"].get("progress", {}) if newest else {}
    last = progress.get("step", 0) if progress.get("finished") else None
    if step < 1 or (last is not None and step > last):
        has = "its steps count from 1" if last is None else f"it has steps 1 to {last}"
        raise UserError(f"{run.url} has no step {step}: {has}")


@contextmanager
def replay_folder(url: str, snapshot: Snapshot | None, *, anyway: bool = False) -> Iterator[tuple[Run, str]]:
    """Give a temporary fork of the run at `url` from `snapshot`, and a folder for results.

    Without a snapshot, the fork is a new run of the same job. It takes no snapshots and reports to no tracker. It may
    be another run than the snapshot's if `anyway`.
    """
    run = run_at(url)
    if anyway:
        run = Run(run.job.model_copy(update={"accept_change": tuple(IDENTITY_KEYS)}), run.name)
    _ensure_same_size(run.job, snapshot)
    with tempfile.TemporaryDirectory(prefix="midstride-replay-") as folder:
        if snapshot is not None:
            fork(run.store, snapshot, Store.open(f"{folder}/{run.name}"), is_temporary=True)
        snapshots = run.job.snapshots or SnapshotOptions.model_validate({})
        yield quiet_copy(run.job.model_copy(update={"snapshots": snapshots}), run.name, folder), folder


def quiet_copy(job: TrainingJob, name: str, folder: str) -> Run:
    """Return a run of `job` in a local folder, without snapshots and trackers."""
    never = {"url": folder, "every_steps": NEVER, "every_seconds": None, "overhead": None, "keep": NEVER}
    changed = {
        "snapshots": job.snapshots and job.snapshots.model_copy(update=never),
        "loggers": (),
        "trainer": job.trainer.model_copy(update={"enable_progress_bar": False, "verify_every": None}),
    }
    return Run(job.model_copy(update=changed), name)


def _ensure_same_size(job: TrainingJob, snapshot: Snapshot | None) -> None:
    was = job.world.ranks if snapshot is None else snapshot.manifest["world_size"]
    if job.world.lanes is None and was != job.world.ranks:
        raise UserError(
            f"snapshot {snapshot.name if snapshot else ''} was taken by {was} ranks, and the job has "
            f"{job.world.ranks}: sums differ in their last bits, so a replay would differ as well"
        )


def replay_run(
    url: str, snapshot: Snapshot | None, plan: ReplayPlan, launch: Launch, *, anyway: bool = False
) -> Replayed:
    """Compute the steps after `snapshot` again, and compare their rows with those of the run.

    Args:
        url: of the run, which does not change.
        snapshot: where to start; None for the start of the run.
        plan: its folder is chosen here.
        launch: trains a run.
        anyway: replay also with other versions and code than the run's; else the ranks refuse.
    """
    recorded = None if anyway else snapshot.manifest["facts"]["bits"] if snapshot else _bits(run_at(url).store)
    followed = replace(plan, recorded=recorded)
    with (
        replay_folder(url, snapshot, anyway=anyway) as (run, folder),
        replay_environment(replace(followed, folder=folder)),
    ):
        outcome = launch(run)
        path = Path(folder, RESULT)
        is_over = path.exists()
        result: dict[str, Any] = json.loads(path.read_text()) if is_over else {"rows": "", "page": {}}
        changed = changes_between(run_at(url).store, run.store)
        start, damaged = started_from(run.store, url) if snapshot else (None, {})
    source = run_at(url)
    name = start or (snapshot.name if snapshot else "")
    parsed = parse_name(name)
    first = parsed[0].step + 1 if parsed else 1
    rows, expected = parse_rows(result["rows"]), metric_rows(source.store)
    mine = [row for row in rows if int(row["step"]) >= first]
    known = {row["step"] for row in expected}
    error = "" if is_over else outcome.error or f"the run ended before step {plan.until}"
    if error and damaged and start is None:
        error = (
            f"no snapshot of {source.url} before step {plan.until} is whole. --from-start computes {plan.until} steps."
        )
    return Replayed(
        source.url,
        name,
        first,
        max((int(row["step"]) for row in mine), default=first - 1),
        first_difference(expected, mine, plan.until),
        sum(row["step"] in known for row in mine),
        result["page"],
        error,
        changed,
        damaged,
    )


def started_from(store: Store, url: str) -> tuple[str | None, dict[str, str]]:
    """Return the snapshot that a temporary fork of `url` resumed from, and damaged ones.

    A fork finds damage as it reads a snapshot, and takes an older one. The reasons are by the names of snapshots.
    """
    lease = newest(store)
    is_own = lease is not None and not inherits(store, lease_path(lease.generation))
    own = store.own if isinstance(store, ForkedStore) else store  # the run itself may have set others aside before
    reasons = SnapshotCatalog(own).set_aside_reasons().items()
    damaged = {name: reason.replace(store.url, run_at(url).url) for name, reason in reasons}
    return (lease.resumed_from if lease and is_own else None), damaged


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
    was, is_now = _bits(before), _bits(now)
    return () if was is None or is_now is None else tuple(recorded_changes(was, is_now))


def _bits(store: Store) -> dict[str, Any] | None:
    """Return the environment of a run's newest attempt; None if unknown."""
    with store.errors_explained("read"):
        try:
            bits: dict[str, Any] = json.loads(store.read("run.json")).get("bits", {})
        except (FileNotFoundError, ValueError):
            return None
    return bits
