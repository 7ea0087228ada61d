"""Forks of a run: made without a copy, and pins that keep their snapshots. No torch.

    <url>/_forks/<parent>/<checksum>.json   names a fork and its snapshot, so that pruning the parent leaves it

Pins lie beside the runs: the folder of the parent does not change.
"""

import logging
from collections import defaultdict
from collections.abc import Sequence

from midstride.engine.errors import SnapshotDamaged, SnapshotMissing, UserError
from midstride.engine.snapshots.catalog import MANIFEST, Snapshot, SnapshotCatalog
from midstride.engine.snapshots.lease import ancestry, read_lease
from midstride.engine.snapshots.parent import PARENT, ForkedStore, Parent
from midstride.engine.storage.checksums import digest_of, encode_document
from midstride.engine.storage.store import Store
from midstride.engine.storage.verification import read_document, verify_files

__all__ = ["FOLDER", "fork", "pinned", "snapshot_at", "snapshot_before"]

log = logging.getLogger(__name__)

#: beside the runs of a store; no run can have this name
FOLDER = "_forks"


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
    source: Store, snapshot: Snapshot, target: Store, settings: Sequence[str] = (), *, is_temporary: bool = False
) -> Parent:
    """Make the empty folder `target` a fork of the run in `source`; nothing is copied.

    Args:
        source: the parent, as `open_run` returns it.
        snapshot: one that counts.
        target: folder of the new run.
        settings: changes of the job, to be shown with the fork.
        is_temporary: write no pin: the snapshot is read at once.

    Raises:
        UserError: `target` exists.
        SnapshotMissing: `snapshot` was pruned meanwhile.
        SnapshotDamaged: a file of it is missing or has another size than its manifest says.
    """
    _ensure_new(target)
    while isinstance(source, ForkedStore) and source.inherits(snapshot.path):
        source = source.origin  # the run that has the files
    lineage = (snapshot.name, *ancestry(source, read_lease(source, snapshot.generation)))
    runs, _, name = source.url.rpartition("/")
    url = f"../{name}" if target.url.rpartition("/")[0] == runs else source.url
    parent = Parent(url, snapshot.manifest["run_id"], lineage, tuple(settings))
    if not is_temporary:
        _pin(source, snapshot, target)
    verify_files(source, f"{snapshot.path}/{MANIFEST}", snapshot.manifest["files"], sizes_only=True)
    if not target.create(PARENT, parent.encode()):
        _ensure_new(target)
    return parent


def _ensure_new(target: Store) -> None:
    if target.list():
        raise UserError(f"{target.url} exists already: give the fork another name")


def _pins(store: Store) -> Store | None:
    """Return the folder of the pins of a run's snapshots; None for a run that lies in no folder."""
    runs, _, name = store.url.rpartition("/")
    if runs.endswith(":/"):
        return None
    return Store.open(runs or "/", store.options).at(f"{FOLDER}/{name}")


def _pin(source: Store, snapshot: Snapshot, target: Store) -> None:
    document = encode_document({"url": target.url, "snapshot": snapshot.name})
    pins = _pins(source)
    if pins is None:
        log.warning("%s lies in no folder: pruning it does not know that the fork needs %s", source.url, snapshot.name)
    else:
        pins.write(f"{digest_of([target.url.encode()])['xxh3_128']}.json", document)


def pinned(store: Store) -> dict[str, list[str]]:
    """Return the snapshots of a run that forks start from, each with the URLs of the forks."""
    found: dict[str, list[str]] = defaultdict(list)
    pins = _pins(store)
    for file in pins.list() if pins is not None else ():
        try:
            document = read_document(pins, file, url=str, snapshot=str) if pins is not None else {}
            if Store.open(document["url"], store.options).exists(PARENT):  # else the fork was removed
                found[document["snapshot"]].append(document["url"])
        except (FileNotFoundError, SnapshotDamaged) as error:
            log.warning("that fork keeps no snapshot: %s", error)
    return dict(found)
