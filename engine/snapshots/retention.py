"""Retention: how many snapshots stay. What the writer of a generation committed it need not ask the store for."""

import logging
from collections.abc import Callable, Iterable

from midstride.engine.snapshots.catalog import Snapshot, SnapshotCatalog
from midstride.engine.snapshots.lease import Lease, ensure_newest
from midstride.engine.snapshots.position import Position
from midstride.engine.storage.store import Store

__all__ = ["Retention"]

log = logging.getLogger(__name__)


class Retention:
    """Removes the old snapshots of a run, in the generation that advances it.

    Args:
        store: of the run.
        lease: of this generation.
        keep: how many snapshots stay.
        sweep: removes the weights that no run which resumes from one of these positions has use for.
    """

    def __init__(
        self,
        store: Store,
        lease: Lease,
        keep: int,
        sweep: Callable[[Iterable[Position]], object] = lambda positions: None,
    ) -> None:
        self._store, self._lease, self._keep, self._sweep = store, lease, keep, sweep
        self._catalog = SnapshotCatalog(store)
        self._known: list[Snapshot] | None = None  # oldest first; None: the store must be asked
        self._rows: dict[str, str] = {}

    def add(self, snapshot: Snapshot, rows: str) -> None:
        """Take note of a snapshot that was committed, and remove those that are too old by now.

        What cannot be removed is tried again after the next one.
        """
        self._rows[snapshot.name] = rows
        try:
            self._prune(snapshot)
        except Exception as error:
            self._known = None
            log.warning("old snapshots of %s could not be removed: %s", self._store.url, error)

    def _prune(self, newest: Snapshot) -> None:
        if self._known is None:
            known = self._catalog.snapshots()
            self._catalog.sweep(newest)
        else:
            known = [*self._known, newest]
        self._known = known
        if len(known) > self._keep:
            ensure_newest(self._store, self._lease)  # a newer world may have resumed from one of them
        while len(known) > self._keep:
            self._catalog.remove(known[0], self._rows.get(known[0].name))
            self._rows.pop(known.pop(0).name, None)
        self._sweep([snapshot.position for snapshot in known])
