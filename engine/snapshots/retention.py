"""Retention: how many snapshots stay, and which weights they need.

A writer knows what its generation committed, so the store is asked only once.
"""

import logging
import math
import time
from collections.abc import Collection, Iterable, Sequence

from midstride.engine.snapshots.catalog import SNAPSHOTS, WEIGHTS, Catalog, Snapshot, SnapshotCatalog
from midstride.engine.snapshots.forks import pinned
from midstride.engine.snapshots.lease import Lease, ensure_newest
from midstride.engine.snapshots.parent import inherits
from midstride.engine.snapshots.position import Position
from midstride.engine.storage.store import Store

__all__ = ["Retention", "archived", "needed_weights"]

log = logging.getLogger(__name__)

#: seconds between two looks at the pins of forks
_PINS_S = 60.0


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
        self._pins: Collection[str] = ()
        self._pins_read = -math.inf

    def add(self, committed: Snapshot, rows: str | None = None, pending: Iterable[Position] = ()) -> None:
        """Note a commit, and remove what is no longer needed.

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
        """Remove what older generations and kills have left."""
        if not self._is_swept:
            ensure_newest(self._store, self._lease)
            for catalog in (self._catalog, *self._weights.values()):
                catalog.sweep(committed)
            self._is_swept = True

    def _prune_snapshots(self) -> None:
        known = self._known_in(SNAPSHOTS)
        own = [snapshot for snapshot in known if not inherits(self._store, snapshot.path)]
        may_go = {snapshot.name for snapshot in own} - archived(own, self._archive_every_steps)
        old = [snapshot for snapshot in known[: -self._keep] if snapshot.name in may_go]
        if not old:
            return
        ensure_newest(self._store, self._lease)  # a newer world may have resumed from one of them
        needed = self._pinned()
        for snapshot in old:
            if snapshot.name not in needed:
                self._catalog.remove(snapshot, self._rows.get(snapshot.name))
                self._rows.pop(snapshot.name, None)
                known.remove(snapshot)

    def _pinned(self) -> Collection[str]:
        """Return the snapshots that forks start from, as of the last minute."""
        if (now := time.monotonic()) - self._pins_read >= _PINS_S:
            self._pins, self._pins_read = pinned(self._store), now
        return self._pins

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
