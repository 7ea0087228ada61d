"""Summaries of the runs in a store, read from their folders. Needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from midstride.engine.config.options import MonitorOptions
from midstride.engine.errors import SnapshotError
from midstride.engine.processes.process_identity import has_ended
from midstride.engine.runs.run import job_of
from midstride.engine.session.attempts import Attempt, AttemptLog
from midstride.engine.snapshots.catalog import Snapshot, SnapshotCatalog
from midstride.engine.snapshots.lease import Lease, generations, lease_path, leases, newest_process
from midstride.engine.snapshots.parent import inherits, parent_of
from midstride.engine.snapshots.position import parse_name
from midstride.engine.snapshots.weights import best_of
from midstride.engine.storage.store import Store

__all__ = ["RunSummary", "attempts_of_script", "last_sign", "newest_snapshot", "state_of", "summary_of", "why_ended"]


@dataclass(frozen=True)
class RunSummary:
    """Progress of a run according to its folder.

    Args:
        name: of the run.
        job: of the run; empty for a script's run.
        state: end of the last attempt: done, stopped, user_error, died or lost. "stopped" also after a stop between
            attempts. "running" without an end, if its process lives or is on another machine: then see the time of the
            last sign. "new" before the first attempt.
        step: of the newest snapshot, or the last attempt's end if that is later.
        epoch: of the newest snapshot, from 0.
        best: name and value of the job's monitored metric for the best weights.
        attempts: how many were made.
        time: of the newest sign of life in the folder, in seconds since the epoch.
        why: why it ended, as a sentence; empty while it runs.
        parent: of a fork: the run and the step that it starts from.
    """

    name: str
    job: str
    state: str
    step: int | None = None
    epoch: int | None = None
    best: tuple[str, float] | None = None
    attempts: int = 0
    time: float | None = None
    why: str = ""
    parent: str = ""


def summary_of(name: str, store: Store) -> RunSummary:
    """Return the summary of the run called `name`, read from its folder."""
    job, attempts = job_of(store), AttemptLog(store).attempts()
    last = attempts[-1] if attempts else None
    newest = newest_snapshot(store)
    progress = newest.manifest["facts"].get("progress", {}) if newest else {}
    steps = [progress.get("step"), last.step if last else None]
    state = state_of(store, last, progress)
    return RunSummary(
        name,
        job.name if job else "",
        state,
        step=max((step for step in steps if step is not None), default=None),
        epoch=progress.get("epoch"),
        best=_best(store, job.monitor) if job and job.monitor else None,
        attempts=len(attempts or attempts_of_script(store, newest)),
        time=last_sign(last, newest),
        why=why_ended(state, last, progress),
        parent=str(parent_of(store) or ""),
    )


def newest_snapshot(store: Store) -> Snapshot | None:
    """Return the newest valid snapshot; None without one, or if damage hides which are valid."""
    try:
        return next(reversed(SnapshotCatalog(store).snapshots()), None)
    except SnapshotError:
        return None


def attempts_of_script(store: Store, newest: Snapshot | None) -> list[Attempt]:
    """Return the attempts of a script by its leases; how they ended is unknown.

    Args:
        store: of the run.
        newest: its newest snapshot; a script that is started again after the last one trains nothing.
    """
    finished = newest.name if newest and newest.manifest["facts"].get("progress", {}).get("finished") else ""
    try:
        own = [lease for lease in leases(store) if not inherits(store, lease_path(lease.generation))]
    except SnapshotError:
        return []
    taken = enumerate((lease for lease in own if lease.resumed_from != finished), 1)
    return [_attempt_of(number, lease) for number, lease in taken]


def _attempt_of(number: int, lease: Lease) -> Attempt:
    parsed = parse_name(lease.resumed_from or "")
    return Attempt(
        number,
        error="it ended early, and the script was started again",
        generation=lease.generation,
        resumed_from=lease.resumed_from,
        resumed_step=parsed[0].step if parsed else None,
    )


def state_of(store: Store, last: Attempt | None, progress: Mapping[str, Any]) -> str:
    """Return the state of a run, one of those of `RunSummary.state`.

    Args:
        store: of the run.
        last: its newest attempt; None where a script trains, which writes none.
        progress: of its newest snapshot; empty where there is none.
    """
    if last is None and (not progress or (parent_of(store) and _is_untrained(store))):
        return "new"
    if last is None and progress.get("finished"):
        return "done"
    if last is not None and not last.is_open:
        return last.outcome if last.stopped is None else "stopped"
    return "lost" if _is_lost(store, last.started if last else 0.0) else "running"


def _is_untrained(fork: Store) -> bool:
    """Return whether no attempt has trained the fork yet."""
    return all(inherits(fork, lease_path(generation)) for generation in generations(fork))


def why_ended(state: str, last: Attempt | None, progress: Mapping[str, Any]) -> str:
    """Return the reason for a run's end as a sentence; "" before it ends or if unknown.

    Args:
        state: result of `state_of`.
        last: as there.
        progress: as there; that of its parent's in a new fork.
    """
    if last is None:
        return str(progress.get("why", "")) if state == "done" else ""
    if last.is_open:
        return ""
    return last.why if last.stopped is None else f"stopped on request after its attempt had ended: {last.why}"


def _is_lost(store: Store, since: float) -> bool:
    """True if the process that advanced the run `since` (Unix time) was local and has ended."""
    try:
        newest = newest_process(store)
    except SnapshotError:
        return False
    return newest is not None and newest[1] >= since and has_ended(newest[0])


def last_sign(last: Attempt | None, newest: Snapshot | None) -> float | None:
    """Return the last sign of life of a run as Unix time, from its newest attempt and snapshot."""
    times = [newest.manifest["time"] if newest else None, (last.ended or last.started) if last else None]
    return max((time for time in times if time), default=None)


def _best(store: Store, monitor: MonitorOptions) -> tuple[str, float] | None:
    value = best_of(store, monitor.metric, monitor.mode).get("metrics", {}).get(monitor.metric)
    return None if value is None else (monitor.metric, float(value))
