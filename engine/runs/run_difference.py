"""The first difference of two runs, and its cause, found by computing steps again."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from midstride.engine.errors import EngineError
from midstride.engine.runs.first_cause import Cause, first_cause
from midstride.engine.runs.recomputed_states import StateDifference, state_difference
from midstride.engine.runs.replay import Launch, changes_between, replay_environment, replay_folder
from midstride.engine.runs.replayed_rows import RowDifference, first_difference
from midstride.engine.runs.run import Run, job_of, run_at
from midstride.engine.runs.run_comparison import compare_runs
from midstride.engine.runs.run_report import metric_rows
from midstride.engine.session.replay_plan import TRACE, ReplayPlan
from midstride.engine.snapshots.catalog import Snapshot, SnapshotCatalog
from midstride.engine.snapshots.parent import open_run
from midstride.engine.snapshots.reader import read
from midstride.engine.storage.store import Store

__all__ = ["RunDifference", "run_difference"]


@dataclass(frozen=True)
class RunDifference:
    """The first difference of two runs.

    Args:
        settings: keys of the job with both values, where they differ.
        changed: versions, hardware and code that differ.
        row: the first value that differs in the metric logs.
        equal_step: the last step at which both keep a snapshot and all states are equal.
        state: the first difference of states, at the first step with unequal snapshots.
        cause: the first difference in the computed steps, in the order of cause.
        why_no_cause: why no steps were computed.
    """

    settings: dict[str, list[Any]] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    row: RowDifference | None = None
    equal_step: int | None = None
    state: StateDifference | None = None
    cause: Cause | None = None
    why_no_cause: str = ""

    @property
    def is_equal(self) -> bool:
        """True if rows and states are equal, as far as both runs have them."""
        return self.row is None and self.state is None


def run_difference(urls: tuple[str, str], launch_for: Callable[[Run], Launch]) -> RunDifference:
    """Return the first difference of the two runs at `urls`, which do not change.

    Args:
        urls: of the runs.
        launch_for: returns a function that trains a fork of a run.
    """
    a, b = (open_run(url) for url in urls)
    compared = compare_runs(dict(zip(urls, (a, b), strict=True)))
    row = first_difference(metric_rows(a), metric_rows(b))
    equal, state = _first_state(a, b)
    found: dict[str, Any] = {"settings": compared.settings, "changed": changes_between(a, b), "row": row}
    found |= {"equal_step": equal[0].position.step if equal else None, "state": state}
    until = min((one.step for one in (row, state) if one is not None), default=None)
    if until is None:
        return RunDifference(**found)
    if job_of(a) is None or job_of(b) is None:
        return RunDifference(**found, why_no_cause="a script trains them; only runs of jobs are computed again here")
    starts = equal if equal and equal[0].position.step < until else (None, None)
    try:
        traces = [_trace(url, start, until, launch_for) for url, start in zip(urls, starts, strict=True)]
    except EngineError as error:
        return RunDifference(**found, why_no_cause=str(error))
    cause = first_cause(*traces)
    why = "" if cause else "computed again here, their steps are equal: code, data or the machine differed then"
    return RunDifference(**found, cause=cause, why_no_cause=why)


def _first_state(a: Store, b: Store) -> tuple[tuple[Snapshot, Snapshot] | None, StateDifference | None]:
    """Return the last snapshots with equal states before a difference, and that difference."""
    equal = None
    for ours, theirs in _pairs(a, b):
        sizes = ours.manifest["world_size"], theirs.manifest["world_size"]
        for rank in range(min(sizes)):
            pair = read(a, ours, rank), read(b, theirs, rank)
            if difference := state_difference(*pair, ours.position.step, rank):
                return equal, difference
        equal = ours, theirs
    return equal, None


def _pairs(a: Store, b: Store) -> Iterator[tuple[Snapshot, Snapshot]]:
    """Yield the snapshots that both runs keep at one position, oldest first."""
    theirs = {snapshot.position: snapshot for snapshot in SnapshotCatalog(b).snapshots()}
    for ours in SnapshotCatalog(a).snapshots():
        if ours.position in theirs:
            yield ours, theirs[ours.position]


def _trace(
    url: str, start: Snapshot | None, until: int, launch_for: Callable[[Run], Launch]
) -> Sequence[Sequence[dict[str, Any]]]:
    """Return the steps of each rank of a run from `start` to step `until`, computed again."""
    with replay_folder(url, start) as (fork, folder):
        with replay_environment(ReplayPlan(folder, until, trace=True)):
            outcome = launch_for(run_at(url))(fork)
        files = sorted(Path(folder).glob(TRACE.format(rank="*")))
        if not files:
            raise EngineError(outcome.error or f"{url} ended before step {until}")
        return [json.loads(file.read_text()) for file in files]
