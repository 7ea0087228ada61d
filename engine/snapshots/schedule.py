"""Schedule of snapshots, equal on every rank, and retention: which of them stay.

All ranks together turn seconds, or a share of the time, into a number of steps every now and then: no step pays for it.
They measure the cost of a snapshot: how long training waits, and how much slower steps are beside the writing.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from midstride.engine.config.options import SnapshotOptions
from midstride.engine.snapshots.catalog import SNAPSHOTS, WEIGHTS, Catalog, Snapshot, SnapshotCatalog
from midstride.engine.snapshots.forks import Pins
from midstride.engine.snapshots.lease import Lease, ensure_newest
from midstride.engine.snapshots.parent import inherits
from midstride.engine.snapshots.position import Position
from midstride.engine.storage.store import Store

__all__ = ["Retention", "SnapshotSchedule", "needed_weights"]

#: a run that asks for nothing else loses at most this much
LONGEST_S = 600.0
#: boundaries after which a rhythm in time is first agreed on; then each time after twice as many
FIRST_LOOK = 4
DEFAULT_OVERHEAD = 0.01
#: what a snapshot counts at least; also what the first one is taken to cost
LEAST_COST_S = 0.01


class SnapshotSchedule:
    """Counts boundaries (steps, validation batches) and tells at which a snapshot is due.

    Args:
        options: the rhythm that was chosen.
        gather: returns every rank's copy of a value, in the order of ranks.
        is_writing: whether a snapshot is being written behind training.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        options: SnapshotOptions,
        gather: Callable[[object], list[Any]],
        is_writing: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options, self._gather, self._is_writing, self._clock = options, gather, is_writing, clock
        self._began, self._count = clock(), 0
        self._due, self._known = FIRST_LOOK, False
        self._stall_s = 0.0
        self._beside: tuple[float, int] | None = (0.0, 0)  # seconds and boundaries beside the writing; None: not over

    def is_due(self, number: int) -> bool:
        """Return whether a snapshot is due at the end of step (or validation batch) `number`."""
        if self._options.every_steps is not None:
            return number % self._options.every_steps == 0
        self._count += 1
        if self._beside is None and not self._is_writing():
            self._beside = self._clock() - self._began, self._count
        if self._count < self._due:
            return False
        if not self._known:
            self._agree()
        return self._known and self._count >= self._due

    def falls_due_within(self, boundaries: int, seconds: float) -> bool:
        """Return whether a snapshot is due in the next `boundaries`, which take `seconds`.

        Every rank calls this.
        """
        if self._options.every_steps is not None:
            return boundaries >= self._options.every_steps
        elapsed_s = self._clock() - self._began
        return any(self._gather(elapsed_s + seconds >= self._wanted_s(elapsed_s)))

    def reset(self, stall_s: float) -> None:
        """Start counting again after a snapshot that held training up for `stall_s` seconds."""
        self._began, self._count, self._stall_s, self._beside = self._clock(), 0, stall_s, None
        self._due, self._known = max(FIRST_LOOK, self._due // 2), False

    def _agree(self) -> None:
        """Turn the time wanted between snapshots into boundaries: those of the rank that wants most."""
        elapsed_s = max(self._clock() - self._began, 1e-6)
        wanted = max(1, round(self._wanted_s(elapsed_s) * self._count / elapsed_s))
        wanted = max(self._gather(wanted))
        # The pace of the first steps says little: look again before believing it.
        self._known = wanted <= 2 * self._count
        self._due = wanted if self._known else 2 * self._count

    def _wanted_s(self, elapsed_s: float) -> float:
        if self._options.every_seconds is not None:
            return self._options.every_seconds
        share = self._options.overhead or DEFAULT_OVERHEAD
        cost_s = max(self._stall_s + self._slowed_s(elapsed_s), LEAST_COST_S)
        return min(LONGEST_S, cost_s / share)

    def _slowed_s(self, elapsed_s: float) -> float:
        """Seconds that the steps beside the writing took longer than as many others."""
        if self._beside is None:
            return elapsed_s  # it is still being written: its time is unknown yet, so wait
        beside_s, beside = self._beside
        others = self._count - beside
        pace_s = (elapsed_s - beside_s) / others if others else 0.0
        return min(max(0.0, beside_s - beside * pace_s), beside_s)


log = logging.getLogger(__name__)


class Retention:
    """Removes old snapshots of a run, and weights that none of the kept snapshots needs.

    Snapshots that a fork starts from stay, and those of a parent are not this run's to remove.

    Args:
        store: of the run.
        lease: of the generation that advances the run.
        keep: number of snapshots to keep.
        archive_every_steps: keep one snapshot for good in each so many steps; None keeps none.
    """

    def __init__(self, store: Store, lease: Lease, keep: int, archive_every_steps: int | None = None) -> None:
        self._store, self._lease, self._keep, self._archive_every_steps = store, lease, keep, archive_every_steps
        self._catalog = SnapshotCatalog(store)
        self._weights = {folder: Catalog(store, folder) for folder in WEIGHTS}
        self._known: dict[str, list[Snapshot]] = {}  # by folder, oldest first; not there: the store must be asked
        self._rows: dict[str, str] = {}
        self._is_swept = False
        self._trusted_step: int | None = None
        self._pins = Pins(store)

    def trust(self, step: int) -> None:
        """Keep the newest snapshot up to `step` from now on, and no longer that of an earlier call."""
        self._trusted_step = step

    def add(self, committed: Snapshot, rows: str | None = None, pending: Iterable[Position] = ()) -> None:
        """Note a commit, and remove snapshots and weights that are no longer needed.

        A failed removal is retried after the next commit.

        Args:
            committed: a snapshot, or weights.
            rows: the snapshot's rows of the metric log.
            pending: positions of snapshots that were taken and are not committed yet.
        """
        try:
            known = self._known_in(committed.folder)
            if committed.name not in [snapshot.name for snapshot in known]:
                known.append(committed)
            if rows is None:
                self._prune_weights([committed.folder], pending)
                return
            self._rows[committed.name] = rows
            self._sweep_once(committed)
            self._prune_snapshots()
            self._prune_weights(WEIGHTS, pending)
        except Exception as error:
            self._known.clear()
            self._is_swept = False
            log.warning("old snapshots of %s could not be removed: %s", self._store.url, error)

    def _known_in(self, folder: str) -> list[Snapshot]:
        """Return the snapshots in `folder` that count, oldest first."""
        if folder not in self._known:
            self._known[folder] = self._weights.get(folder, self._catalog).snapshots()
        return self._known[folder]

    def _sweep_once(self, committed: Snapshot) -> None:
        """Remove the leftovers of older generations and kills."""
        if not self._is_swept:
            ensure_newest(self._store, self._lease)
            pinned = self._pins.read()
            for catalog in (self._catalog, *self._weights.values()):
                catalog.sweep(committed, pinned)
            self._is_swept = True

    def _prune_snapshots(self) -> None:
        known = self._known_in(SNAPSHOTS)
        own = [snapshot for snapshot in known if not inherits(self._store, snapshot.path)]
        may_go = {snapshot.name for snapshot in own} - archived(own, self._archive_every_steps) - {*self._pins.known}
        if (step := self._trusted_step) is not None:
            may_go -= {one.name for one in [one for one in known if one.position.step <= step][-1:]}
        old = [snapshot for snapshot in known[: -self._keep] if snapshot.name in may_go]
        if not old:
            return
        ensure_newest(self._store, self._lease)  # a newer world may have resumed from one of them
        for snapshot in self._catalog.remove(*old, rows=self._rows, pins=self._pins.read):
            self._rows.pop(snapshot.name, None)
            known.remove(snapshot)

    def _prune_weights(self, folders: Sequence[str], pending: Iterable[Position]) -> None:
        positions = [*(snapshot.position for snapshot in self._known_in(SNAPSHOTS)), *pending]
        for folder in folders:
            known = self._known_in(folder)
            needed = needed_weights([weights.position for weights in known], positions)
            if len(needed) == len(known):
                continue
            ensure_newest(self._store, self._lease)
            for number in sorted({*range(len(known))} - needed, reverse=True):
                self._weights[folder].discard(known[number])
                del known[number]


def archived(snapshots: Iterable[Snapshot], every_steps: int | None) -> set[str]:
    """Return the names of the first snapshot in each `every_steps` steps."""
    first: dict[int, str] = {}
    for snapshot in snapshots if every_steps is not None else ():
        first.setdefault(snapshot.position.step // (every_steps or 1), snapshot.name)
    return {*first.values()}


def needed_weights(weights: Sequence[Position], snapshots: Iterable[Position]) -> set[int]:
    """Return the indices of the weights needed to resume from any of `snapshots`.

    These are the newest weights, and for each snapshot the newest before it. Weights at the very position of a snapshot
    may have been saved before it or after it, so both are needed.

    >>> sorted(needed_weights([Position(1), Position(2), Position(5), Position(6)], [Position(3)]))
    [1, 3]

    Args:
        weights: where weights were saved, oldest first.
        snapshots: where snapshots were taken.
    """
    needed = {len(weights) - 1} if weights else set()
    for snapshot in snapshots:
        needed |= {number for number, position in enumerate(weights) if position == snapshot}
        needed |= {*[number for number, position in enumerate(weights) if position < snapshot][-1:]}
    return needed
