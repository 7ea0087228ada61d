"""States of a run, computed again between kept snapshots, and compared part by part."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from midstride.engine.errors import SnapshotDamaged, SnapshotMissing, UserError
from midstride.engine.metrics.values import OF_TIME
from midstride.engine.runs.replay import Launch, changes_between, replay_environment, replay_folder, started_from
from midstride.engine.runs.replayed_rows import RowDifference, first_difference
from midstride.engine.runs.run import run_at
from midstride.engine.runs.run_report import metric_rows
from midstride.engine.session.replay_plan import ReplayPlan
from midstride.engine.snapshots.catalog import Snapshot, SnapshotCatalog
from midstride.engine.snapshots.reader import read
from midstride.engine.snapshots.weights import error_with_remedy, is_of_the_end
from midstride.engine.state.differences import iter_differences
from midstride.engine.storage.store import Store

__all__ = ["PARTS", "StateDifference", "Verified", "snapshot_difference", "state_difference", "verify_run"]

#: parts of a state in the order of cause: what comes first decides what comes later
PARTS = (
    *("structure", "progress", "samples", "feeds", "generators", "objects", "user", "callbacks", "logged", "metrics"),
    *("gradients", "optimizers", "precision", "schedulers", "module", "buffers", "modes", "strategy"),
)

#: path of a value in the rows of the metric log that are not closed
_LOGGED = re.compile(r"^logged/rows/(?:(?:open|pending)/(?P<of_all>.*)|pending_shares/(?P<of_rank>.*)/\d+)$")


@dataclass(frozen=True)
class StateDifference:
    """The first difference of two states at one step, in the order of cause.

    Args:
        step: of both states.
        rank: whose state differs.
        path: the part of the state, and the way to the value in it.
        expected: value in the run, as text.
        found: value that was computed.
        others: number of further differences of that rank.
    """

    step: int
    rank: int
    path: str
    expected: str
    found: str
    others: int = 0

    def __str__(self) -> str:
        return self.text("computed ")

    def text(self, before: str = "") -> str:
        """Return it as text, with a word before the second value."""
        more = f"; {self.others} more values of that rank differ" if self.others else ""
        return (
            f"step {self.step}, rank {self.rank}, {_in_words(self.path)}: {self.expected}, {before}{self.found}{more}"
        )


def _in_words(path: str) -> str:
    """Return the path of a value in a state as text; of a logged metric its name."""
    return _LOGGED.sub(r"the logged metric '\g<of_all>\g<of_rank>'", path)


@dataclass(frozen=True)
class Verified:
    """The outcome of a verification.

    Args:
        url: of the run.
        start: step of the snapshot that it started from.
        equal: steps at which the whole state is equal.
        difference: the first difference of states; None if all are equal.
        row: the first difference of metric rows.
        error: the error that ended the computation early.
        changed: changes of versions, hardware and code since the run.
    """

    url: str
    start: int
    equal: tuple[int, ...]
    difference: StateDifference | None = None
    row: RowDifference | None = None
    error: str = ""
    changed: tuple[str, ...] = ()


def verify_run(url: str, first: int | None, last: int | None, launch: Launch) -> Verified:
    """Compute the run at `url` again between two kept snapshots, and compare its states.

    Args:
        url: of the run, which does not change.
        first: step of a kept snapshot; by default the oldest.
        last: step of a later one; by default the newest.
        launch: trains a run.

    Raises:
        SnapshotMissing: these snapshots are not kept.
    """
    run = run_at(url)
    start, targets = _kept(run.store, first, last)
    end = targets[-1]
    steps = tuple(target.position.step for target in targets if not is_of_the_end(target))
    until = end.position.step + 1 if is_of_the_end(end) else end.position.step  # its end comes by itself
    with replay_folder(url, start) as (fork, folder):
        with replay_environment(ReplayPlan(folder, until, snapshots_at=steps or (until,))):
            outcome = launch(fork)
        began, damaged = started_from(fork.store, run.url)
        if start.name in damaged or began not in (None, start.name):
            reason = damaged.get(start.name, f"an older one was taken: {began}")
            kept = SnapshotCatalog(run.store).snapshots()
            others = [one for one in kept if one.name != start.name and not is_of_the_end(one)]
            none = "No other step to start from is kept: keep more with snapshots.keep"
            way = f"Start from another step: {_steps(others)}" if others else none
            error = f"snapshot {start.name} is damaged: {reason}. {way}"
            return Verified(run.url, start.position.step, (), error=error)
        changed = changes_between(run.store, fork.store)
        equal: list[int] = []
        difference, row, store, catalog = None, None, fork.store, SnapshotCatalog(run.store)
        removed = [] if began or catalog.has(start.name) else [start]
        computed = {_place(one): one for one in SnapshotCatalog(store).snapshots() if one.generation > start.generation}
        for target in targets:
            if (mine := computed.get(_place(target))) is None:
                error = _removed(removed) or outcome.error or "it ended early"
                return Verified(run.url, start.position.step, tuple(equal), error=error, changed=changed)
            try:
                difference = snapshot_difference(run.store, target, store, mine)
            except (SnapshotDamaged, SnapshotMissing):
                if catalog.has(target.name):
                    raise
                removed.append(target)  # the run is training
                continue
            if difference:
                row = first_difference(metric_rows(run.store), metric_rows(store))
                break
            equal.append(target.position.step)
    error = "" if difference else _removed(removed)
    return Verified(run.url, start.position.step, tuple(equal), difference, row, error, changed)


def _removed(snapshots: Sequence[Snapshot]) -> str:
    """Return the error that names snapshots removed by the run meanwhile; "" without any."""
    if not snapshots:
        return ""
    return (
        f"the run trains, and has removed its snapshot of step {_steps(snapshots)} before it was compared. Keep more "
        "with snapshots.keep, or verify the run once it has ended"
    )


def _place(snapshot: Snapshot) -> int:
    return -1 if is_of_the_end(snapshot) else snapshot.position.step


def _kept(store: Store, first: int | None, last: int | None) -> tuple[Snapshot, list[Snapshot]]:
    """Return the snapshot to start from, and later ones: after a step, or of the end."""
    kept = SnapshotCatalog(store).snapshots()
    whole = [one for one in kept if is_of_the_end(one) or not one.position.after]
    known = _steps(whole)
    for step in (first, last):
        if step is not None and step not in {one.position.step for one in kept}:
            raise SnapshotMissing(f"{store.url} keeps no snapshot of step {step}; it keeps: {known or 'none'}")
    starts = [one for one in kept if first in (None, one.position.step) and not is_of_the_end(one)]
    if not kept:
        raise SnapshotMissing(f"{store.url} has no snapshot to start from: train it first")
    if not starts:
        raise SnapshotMissing(f"{store.url} keeps no snapshot to start from: keep more with snapshots.keep")
    start = starts[0] if first is None else starts[-1]
    targets = [one for one in whole if start.position < one.position and (last is None or one.position.step <= last)]
    if not targets:
        raise UserError(f"{store.url} keeps no snapshot after step {start.position.step} to compare with: {known}")
    return start, targets


def _steps(snapshots: Sequence[Snapshot]) -> str:
    """Return the steps of `snapshots` as text."""
    return ", ".join(dict.fromkeys(str(one.position.step) for one in snapshots))


def snapshot_difference(ours: Store, expected: Snapshot, theirs: Store, found: Snapshot) -> StateDifference | None:
    """Return the first difference of two snapshots, by ranks that both have; None if equal.

    Raises:
        SnapshotDamaged: a file is missing or differs; the message has the remedy.
    """
    for rank in range(min(one.manifest["world_size"] for one in (expected, found))):
        with error_with_remedy():
            pair = _state(ours, expected, rank), _state(theirs, found, rank)
        if difference := state_difference(*pair, expected.position.step, rank):
            return difference
    return None


def _state(store: Store, snapshot: Snapshot, rank: int) -> Any:
    with store.errors_explained("read"):
        return read(store, snapshot, rank)


def state_difference(expected: Any, found: Any, step: int, rank: int) -> StateDifference | None:
    """Return the first difference of two states, in the order of cause; None if equal."""
    different = iter_differences(expected, found)
    told = (one for one in different if not (one[0].startswith("kept trainer/") and one[0].endswith(OF_TIME)))
    every = sorted(told, key=lambda one: _order(one[0], PARTS))
    return StateDifference(step, rank, *every[0], len(every) - 1) if every else None


def _order(path: str, parts: Sequence[str]) -> int:
    part = path.partition("/")[0]
    return parts.index(part) if part in parts else len(parts)
