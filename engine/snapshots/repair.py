"""Repair: finds and rebuilds damaged parts of a run. Needs no torch, except for weights.

Leases are made from the manifests, which repeat their content; weights from the newest good snapshot, where it holds
them. Damaged snapshots, and other damaged weights, are set aside, so that older ones count. What of the metric log
no copy holds is named and stays missing.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from midstride.engine.errors import SnapshotDamaged, SnapshotUnreadable
from midstride.engine.snapshots.catalog import MANIFEST, SNAPSHOTS, WEIGHTS, Catalog, Snapshot, SnapshotCatalog
from midstride.engine.snapshots.lease import BLOCK, Lease, generations, lease_document, lease_path, read_lease
from midstride.engine.snapshots.position import parse_name
from midstride.engine.snapshots.weights import last_is_missing, missing_weights, newest_weights
from midstride.engine.storage.store import Store
from midstride.engine.storage.verification import read_document

__all__ = ["Repair", "repairs"]

_NO_COPY = "no snapshot and no other lease names the snapshot from which it resumed: start over under another run name"
_OLDER = "older weights count, or none until the run resumes"


@dataclass(frozen=True)
class Repair:
    """Something to be done, as text; `act` does it, and is None where nothing can be."""

    message: str
    act: Callable[[], object] | None


def repairs(store: Store) -> list[Repair]:
    """Return the repairs of the run in `store`, leases first: other repairs depend on them."""
    if found := [*_leases(store)]:
        return found
    return [*_weights(store), *_snapshots(store), *_log(store)]


def _leases(store: Store) -> Iterator[Repair]:
    known, present = _described(store), {*generations(store)}
    newest = max([*present, *known], default=0)
    needed = _ancestors(known.get(newest))
    for generation in sorted(number for number in {*present, *known, *needed} if number > 0):
        try:
            read_lease(store, generation)
            continue
        except SnapshotDamaged as error:
            path, fault = lease_path(generation), str(error).partition(": `")[0]
        if (lease := known.get(generation)) is None and generation == newest:
            lease = _empty(store, known, generation)
        if lease is None:
            if generation in needed:
                yield Repair(f"{fault}; {_NO_COPY}", None)
            elif generation in present:
                yield Repair(
                    f"{fault}; no snapshot is left of it, and none that counts came from one: remove it",
                    partial(store.remove, path),
                )
            continue
        origin = f"resumed from {lease.resumed_from}" if lease.resumed_from else "a fresh start"
        yield Repair(f"{fault}; rebuild it: generation {generation}, {origin}", _rewrite(store, path, lease))


def _ancestors(lease: Lease | None) -> set[int]:
    return {parsed[1] for name in (lease.ancestors if lease else ()) if (parsed := parse_name(name))}


def _rewrite(store: Store, path: str, lease: Lease) -> Callable[[], None]:
    def act() -> None:
        store.remove(path)
        store.create(path, lease_document(lease, {"repaired": True}))

    return act


def _described(store: Store) -> dict[int, Lease]:
    """Return the leases that whole manifests and leases speak of, by generation."""
    found: dict[int, Lease] = {}
    documents = [*_documents(store)]
    of_leases = {document["run_id"] for document in documents if "files" not in document}
    for document in documents:
        run_id = document["run_id"]
        if of_leases and run_id not in of_leases:
            continue  # a snapshot of another run
        names = document["ancestors"]
        chain = [document["generation"], *(parsed[1] for name in names if (parsed := parse_name(name)))]
        for at, generation in enumerate(chain):
            rest = tuple(names[at:])
            if at and not rest and generation % BLOCK == 0:
                continue  # what it resumed from only its own lease and its own manifests tell
            found.setdefault(generation, Lease(generation, rest[0] if rest else None, run_id, rest))
    return found


def _documents(store: Store) -> Iterator[dict[str, Any]]:
    paths = [f"{SNAPSHOTS}/{name}/{MANIFEST}" for name in reversed(store.list(SNAPSHOTS)) if parse_name(name)]
    for path in (*paths, *map(lease_path, reversed(generations(store)))):
        try:
            document = read_document(store, path, generation=int, run_id=str, ancestors=list)
        except (FileNotFoundError, SnapshotDamaged):
            continue
        parsed = parse_name(path.split("/")[1])
        of = lease_path(document["generation"]) == path if parsed is None else parsed[1] == document["generation"]
        if of and all(isinstance(name, str) for name in document["ancestors"]):
            yield document


def _empty(store: Store, known: Mapping[int, Lease], generation: int) -> Lease | None:
    """Return a lease for a generation without a commit, which continues from the newest before."""
    named = {name: parsed for name in store.list(SNAPSHOTS) if (parsed := parse_name(name))}
    older = {number for _, number in named.values() if number < generation}
    for number in sorted(older, reverse=True):
        lease = known.get(number)
        mine = [
            name for name, (_, of) in named.items() if of == number and store.exists(f"{SNAPSHOTS}/{name}/{MANIFEST}")
        ]
        if lease and mine:
            chain = (max(mine), *lease.ancestors)
            return Lease(generation, chain[0], lease.run_id, chain)
    return None


def _weights(store: Store) -> Iterator[Repair]:
    newest = _newest_good(store)
    for folder in WEIGHTS:
        catalog = Catalog(store, folder)
        try:
            if saved := newest_weights(store, folder):
                catalog.verify(saved)
        except SnapshotDamaged as error:
            name, aside = catalog.newest_name(), catalog.newest_good
            yield _rebuilt(store, folder, name, newest, f"{error}", Repair(f"set it aside: {_OLDER}", aside))
            continue
        if newest is None:
            continue
        if folder == "last" and (fault := last_is_missing(store, newest)):
            yield _rebuilt(
                store, folder, newest.name, newest, fault, Repair("`fit` the run again: it writes them", None)
            )
        if fault := missing_weights(store, newest).get(folder, ""):
            name = newest.manifest["facts"]["weights"][folder]
            yield _rebuilt(store, folder, name, newest, fault, Repair(_OLDER, None))


def _rebuilt(store: Store, folder: str, name: str, newest: Snapshot | None, fault: str, otherwise: Repair) -> Repair:
    """Return the repair of weights from the snapshot `newest`, or the reason against it.

    Then `otherwise` is done.
    """
    from midstride.engine.snapshots.weights_rebuild import NotRebuilt, rebuild  # imports torch

    try:
        if newest is None:
            raise NotRebuilt("no good snapshot is left")
        act = rebuild(store, folder, name, newest)
    except NotRebuilt as why:
        return Repair(f"{fault}; not rebuilt from a snapshot: {why}; {otherwise.message}", otherwise.act)
    return Repair(f"{fault}; rebuild {folder}/{name} from snapshot {newest.name}", act)


def _newest_good(store: Store) -> Snapshot | None:
    catalog = SnapshotCatalog(store)
    for snapshot in reversed(catalog.snapshots()):
        with suppress(SnapshotDamaged):
            catalog.verify(snapshot)
            return snapshot
    return None


def _snapshots(store: Store) -> Iterator[Repair]:
    catalog = SnapshotCatalog(store)
    set_aside = catalog.set_aside_reasons()
    for name in reversed(store.list(SNAPSHOTS)):
        if not parse_name(name) or name in set_aside:
            continue
        try:
            if snapshot := catalog.get(name):
                catalog.verify(snapshot)
        except SnapshotDamaged as error:
            yield Repair(
                f"{error}; set snapshot {name} aside: an older one is taken",
                partial(catalog.set_aside, name, str(error)),
            )


def _log(store: Store) -> Iterator[Repair]:
    catalog = SnapshotCatalog(store)
    for fault in catalog.log_faults():
        yield Repair(f"{fault}; no snapshot has those rows: the log keeps a gap", None)
    text = catalog.metric_log().encode()
    try:
        with store.reading("metrics.csv"):
            found = store.read("metrics.csv")
    except FileNotFoundError:
        return
    except SnapshotUnreadable as error:
        yield Repair(f"{error}; write it again", lambda: store.write("metrics.csv", text))
        return
    if found not in (b"", text):
        yield Repair("metrics.csv differs from the snapshots; write it again", lambda: store.write("metrics.csv", text))
