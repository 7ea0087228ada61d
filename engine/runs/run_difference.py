"""The first difference of two runs, and its cause, found by computing steps again."""

import ast
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from midstride.engine.errors import EngineError, SnapshotDamaged
from midstride.engine.formatting import format_count
from midstride.engine.runs.recomputed_states import StateDifference, snapshot_difference
from midstride.engine.runs.replay import Launch, changes_between, replay_environment, replay_folder
from midstride.engine.runs.replayed_rows import RowDifference, first_difference
from midstride.engine.runs.run import Run, job_of, run_at
from midstride.engine.runs.run_comparison import compare_runs
from midstride.engine.session.replay_plan import TRACE, ReplayPlan
from midstride.engine.snapshots.catalog import Snapshot, SnapshotCatalog
from midstride.engine.snapshots.parent import open_run
from midstride.engine.storage.store import Store

__all__ = ["Cause", "first_cause", "run_difference"]


#: in the order of cause: what comes first decides what comes later
KINDS = ("samples", "batch", "random state", "loss", "gradient", "optimizer state", "weight", "buffer")

#: digits of the shortest digest
_DIGEST = 32

_SCRIPT = (
    "a script trains one of them, and midstride cannot start it. As the script of a job (script: train.py), its steps "
    "are computed again. Until then, see the first snapshot that differs: keep more with snapshots.keep"
)

_OTHER_LAYOUT = (
    "one trained under {}, the other under {}: samples, gradients and states are divided otherwise. Only the metric "
    "logs are compared. To compare more, train one of them as the other: world.strategy, world.processes"
)

Steps = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Cause:
    """The first difference of two runs.

    Args:
        step: in which it is; one before the first compared step for a state that differs from the start.
        rank: whose part differs.
        kind: one of `KINDS`.
        name: of the value: a parameter's, a place in the batch.
        values: both values or digests.
        others: number of further values of this kind that differ in this step.
    """

    step: int
    rank: int
    kind: str
    name: str
    values: tuple[str, str]
    others: int = 0

    def __str__(self) -> str:
        more = f" and {self.others} more" if self.others else ""
        return f"step {self.step}, rank {self.rank}, {self.kind}: {self.name}{more} ({_in_words(*self.values)})"


def first_cause(ours: Sequence[Steps], theirs: Sequence[Steps]) -> Cause | None:
    """Return the first difference of two traces: by step, order of cause, rank; None if equal.

    Args:
        ours: the steps of each rank.
        theirs: those of the other run.
    """
    for at in range(min(map(len, (*ours, *theirs)), default=0)):
        for kind in KINDS:
            for rank, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
                if cause := _cause(mine[at], other[at], kind, rank):
                    return cause
    return None


def _cause(mine: Mapping[str, Any], other: Mapping[str, Any], kind: str, rank: int) -> Cause | None:
    ours, theirs = mine.get(kind, {}), other.get(kind, {})
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if not names:
        return None
    values = ours.get(names[0], "nothing"), theirs.get(names[0], "nothing")
    return Cause(mine["step"], rank, kind, names[0], values, len(names) - 1)


def _in_words(ours: str, theirs: str) -> str:
    """Return both values; of two lists of samples the first that differ."""
    with suppress(ValueError, SyntaxError):
        lists = ast.literal_eval(ours), ast.literal_eval(theirs)
        if all(isinstance(one, list | tuple) for one in lists) and len(lists[0]) == len(lists[1]):
            at = next(at for at, (a, b) in enumerate(zip(*lists, strict=True)) if a != b)
            return f"at place {at}: {lists[0][at]!r}, and {lists[1][at]!r}"
    is_digest = len(ours) == len(theirs) and len(ours) >= _DIGEST and ours.isalnum()
    return "other content" if is_digest else f"{ours:.60}, and {theirs:.60}"


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
        why_no_cause: why no steps were computed; of equal rows, why no states were compared.
        damaged: why snapshots could not be compared.
        last: the last step of each run.
    """

    settings: dict[str, list[Any]] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    row: RowDifference | None = None
    equal_step: int | None = None
    state: StateDifference | None = None
    cause: Cause | None = None
    why_no_cause: str = ""
    damaged: tuple[str, ...] = ()
    last: tuple[int, int] = (0, 0)

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
    compared = compare_runs({"a": a, "b": b})
    rows, kept = compared.rows, (_snapshots(a), _snapshots(b))
    row = first_difference(rows[0], rows[1])
    layouts = [_layout(one) for one in kept]
    is_alike = None in layouts or layouts[0] == layouts[1]
    equal, state, damaged = _first_state(a, b, _pairs(*kept) if is_alike else [])
    found: dict[str, Any] = {
        "settings": compared.settings,
        "changed": changes_between(a, b),
        "row": row,
        "damaged": damaged,
        "last": tuple(map(_last_step, kept, rows)),
    }
    found |= {"equal_step": equal[0].position.step if equal else None, "state": state}
    if not is_alike:
        return RunDifference(**found, why_no_cause=_OTHER_LAYOUT.format(*layouts))
    until = min((one.step for one in (row, state) if one is not None), default=None)
    if until is None:
        return RunDifference(**found)
    if job_of(a) is None or job_of(b) is None:
        return RunDifference(**found, why_no_cause=_SCRIPT)
    starts = equal if equal and equal[0].position.step < until else (None, None)
    try:
        traces = [_trace(url, start, until, launch_for) for url, start in zip(urls, starts, strict=True)]
    except EngineError as error:
        return RunDifference(**found, why_no_cause=str(error))
    cause = first_cause(*traces)
    why = "" if cause else "computed again here, their steps are equal: code, data or the machine differed then"
    return RunDifference(**found, cause=cause, why_no_cause=why)


def _snapshots(store: Store) -> list[Snapshot]:
    with store.errors_explained("read"):
        return SnapshotCatalog(store).snapshots()


def _layout(kept: Sequence[Snapshot]) -> str | None:
    """Return the strategy and number of ranks of a run's newest snapshot; None without one."""
    if not kept:
        return None
    manifest = kept[-1].manifest
    ranks = format_count(manifest["world_size"], "rank")
    return f"{manifest['facts'].get('identity', {}).get('strategy')} with {ranks}"


def _last_step(kept: Iterable[Snapshot], rows: Iterable[Mapping[str, str]]) -> int:
    return max([*(one.position.step for one in kept), *(int(row["step"]) for row in rows)], default=0)


def _first_state(
    a: Store, b: Store, pairs: Iterable[tuple[Snapshot, Snapshot]]
) -> tuple[tuple[Snapshot, Snapshot] | None, StateDifference | None, tuple[str, ...]]:
    """Return the last equal snapshots before a difference, that difference, and damaged ones."""
    equal, damaged = None, list[str]()
    for ours, theirs in pairs:
        try:
            difference = snapshot_difference(a, ours, b, theirs)
        except SnapshotDamaged as error:
            damaged.append(str(error))
            continue
        if difference is not None:
            return equal, difference, tuple(damaged)
        equal = ours, theirs
    return equal, None, tuple(damaged)


def _pairs(a: Sequence[Snapshot], b: Sequence[Snapshot]) -> list[tuple[Snapshot, Snapshot]]:
    """Return the snapshots that both runs keep at one position, oldest first."""
    theirs = {snapshot.position: snapshot for snapshot in b}
    return [(ours, theirs[ours.position]) for ours in a if ours.position in theirs]


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
