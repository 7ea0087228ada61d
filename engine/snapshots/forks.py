"""Forks of a run: made without a copy, and pins that keep their snapshots. No torch.

    <url>/_forks/<parent>/<number>.json   names a fork and its snapshot, so that pruning the parent leaves it

Pins lie beside the runs: the folder of the parent does not change. Pruning announces what it removes, then reads the
pins; a fork writes its pin, then looks for announcements. So no fork is left without its snapshot.
"""

import logging
import time
from collections import defaultdict
from uuid import uuid4

from midstride.engine.errors import EngineError, SnapshotDamaged, SnapshotMissing, UserError
from midstride.engine.snapshots.catalog import MANIFEST, Snapshot, SnapshotCatalog
from midstride.engine.snapshots.lease import ancestry, read_lease
from midstride.engine.snapshots.lineage import Lineage
from midstride.engine.snapshots.parent import NO_CHANGES, PARENT, Changes, ForkedStore, Parent, read_parent
from midstride.engine.storage.checksums import NUMBER, encode_document
from midstride.engine.storage.store import Store
from midstride.engine.storage.verification import read_document, verify_files

__all__ = ["FOLDER", "Pins", "fork", "snapshot_at", "snapshot_before"]

log = logging.getLogger(__name__)

#: beside the runs of a store; no run can have this name
FOLDER = "_forks"
#: so long a pin counts before its fork exists
_PIN_S = 3600.0
#: so old the answer of a fork that it exists may be
_KNOWN_S = 60.0


def snapshot_at(store: Store, step: int | None = None) -> Snapshot:
    """Return the last snapshot at `step` of the run in `store`; without a step, the newest.

    Raises:
        SnapshotMissing: there is none; the message names the nearest steps.
    """
    kept = SnapshotCatalog(store).snapshots()
    if not kept:
        raise SnapshotMissing(f"{store.url} has no snapshot to start from: train it first")
    if step is None:
        return kept[-1]
    if found := [snapshot for snapshot in kept if snapshot.position.step == step]:
        return found[-1]
    before = [one.position.step for one in kept if one.position.step < step][-1:]
    after = [one.position.step for one in kept if one.position.step > step][:1]
    if not after:
        raise SnapshotMissing(f"{store.url} has no snapshot of step {step}: its newest one is of step {before[0]}")
    nearest = " and ".join(map(str, before + after))
    raise SnapshotMissing(f"{store.url} keeps no snapshot of step {step}. The nearest are of steps {nearest}.")


def snapshot_before(store: Store, step: int) -> Snapshot:
    """Return the newest snapshot of the run in `store` from which `step` can be computed.

    Raises:
        SnapshotMissing: none is kept; the message says how many steps a replay from the start takes.
    """
    kept = SnapshotCatalog(store).snapshots()
    if before := [snapshot for snapshot in kept if snapshot.position.step < step]:
        return before[-1]
    first = f" (first: step {kept[0].position.step})" if kept else ""
    raise SnapshotMissing(
        f"{store.url} keeps no snapshot before step {step}{first}. --from-start computes {step} steps."
    )


def fork(
    source: Store, snapshot: Snapshot, target: Store, changes: Changes = NO_CHANGES, *, is_temporary: bool = False
) -> Parent:
    """Make the empty folder `target` a fork of the run in `source`; nothing is copied.

    Args:
        source: the parent, as `open_run` returns it.
        snapshot: one that counts.
        target: folder of the new run.
        changes: of the job, kept with the fork.
        is_temporary: write no pin, and leave the check of the files to the fit that reads them at once.

    Raises:
        UserError: `target` exists.
        SnapshotMissing: `snapshot` was pruned meanwhile, or a newer attempt has resumed from an earlier one.
        SnapshotDamaged: a file of it is missing or has another size than its manifest says.
    """
    _ensure_new(target)
    run = source
    while isinstance(source, ForkedStore) and source.inherits(snapshot.path):
        source = source.origin  # the run that has the files
    lineage = (snapshot.name, *ancestry(source, read_lease(source, snapshot.generation)))
    runs, _, name = source.url.rpartition("/")
    url = f"../{name}" if target.url.rpartition("/")[0] == runs else source.url
    parent = Parent(url, snapshot.manifest["run_id"], lineage, changes)
    pins = None if is_temporary else _pins(source)
    if pins is not None:
        _create_pinned(pins, source, snapshot, target, parent, run)
        return parent
    if not is_temporary:
        _ensure_whole(source, snapshot)
        log.warning("%s is not in a folder: pruning it can remove %s, which the fork needs", source.url, snapshot.name)
    _create(target, parent)
    return parent


def _create(target: Store, parent: Parent) -> None:
    if not target.create(PARENT, parent.encode()):
        _ensure_new(target)


def _create_pinned(pins: Store, source: Store, snapshot: Snapshot, target: Store, parent: Parent, run: Store) -> None:
    """Make a fork of `run`, and pin its snapshot, which lies in `source`; raises as `fork`."""
    made, file = time.time(), f"{uuid4().hex}.json"
    pin = {"url": target.url, "snapshot": snapshot.name}
    pins.write(file, encode_document({**pin, "made": made}))
    try:
        _ensure_whole(source, snapshot)
        if SnapshotCatalog(source).is_about_to_go(snapshot):
            raise SnapshotMissing(
                f"{source.url} is removing its snapshot {snapshot.name}, or was killed while it did: fork another step"
            )
        if not Lineage.of(run).holds(snapshot.name):  # its weights may be gone
            raise SnapshotMissing(
                f"{run.url} has resumed from a snapshot before {snapshot.name} meanwhile: fork another step"
            )
    except EngineError:
        pins.remove(file)
        raise
    _create(target, parent)
    if time.time() - made > _PIN_S / 2:
        target.remove(PARENT)
        raise SnapshotMissing(f"{target.url} took too long to fork. Fork again")
    pins.write(file, encode_document({**pin, "made": 0.0}))


def _ensure_whole(source: Store, snapshot: Snapshot) -> None:
    verify_files(source, f"{snapshot.path}/{MANIFEST}", snapshot.manifest["files"], sizes_only=True)


def _ensure_new(target: Store) -> None:
    if target.list():
        raise UserError(f"{target.url} exists already: give the fork another name")


def _pins(store: Store) -> Store | None:
    """Return the folder of the pins of a run's snapshots; None for a run that lies in no folder."""
    runs, _, name = store.url.rpartition("/")
    if runs.endswith(":/"):
        return None
    return Store.open(runs or "/", store.options).at(f"{FOLDER}/{name}")


class Pins:
    """The pins of a run's snapshots.

    A pin counts while its fork exists, and for an hour if the fork is in the making.

    Args:
        store: of the run.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._pins = store, _pins(store)
        self._documents: dict[str, tuple[str, str, float]] = {}  # file -> URL, snapshot, when it was begun
        self._asked: dict[str, float] = {}  # file -> when the fork was there
        self.known: dict[str, list[str]] = {}  #: as of the last reading

    def read(self) -> dict[str, list[str]]:
        """Return the snapshots that forks start from, each with the URLs of the forks."""
        found: dict[str, list[str]] = defaultdict(list)
        for file in self._pins.list() if self._pins is not None else ():
            try:
                url, snapshot, _ = self._document(file)
                if self._counts(file):
                    found[snapshot].append(url)
            except (FileNotFoundError, SnapshotDamaged) as error:
                log.warning("that fork keeps no snapshot: %s", error)
        self.known = dict(found)
        return self.known

    def _document(self, file: str) -> tuple[str, str, float]:
        if file not in self._documents and self._pins is not None:
            document = read_document(self._pins, file, url=str, snapshot=str, made=NUMBER)
            self._documents[file] = document["url"], document["snapshot"], document["made"]
        return self._documents[file]

    def _counts(self, file: str) -> bool:
        """Return whether a pin's fork exists, or may still be in the making."""
        (url, snapshot, made), now = self._documents[file], time.monotonic()
        if now - self._asked.get(file, -_KNOWN_S) < _KNOWN_S:
            return True
        try:
            parent = read_parent(Store.open(url, self._store.options))
        except SnapshotDamaged:
            return True  # which one it needs is unknown
        if parent is None:
            return abs(time.time() - made) < _PIN_S
        if parent.snapshot == snapshot:
            self._asked[file] = now
        return parent.snapshot == snapshot
