"""Leases: which generation of a run may write. Needs no torch.

Every attempt that begins to train is a generation: it takes its number by creating `lease/NNNNNN.json` exclusively.
The newest lease counts. It names the snapshot from which its generation resumed, so that snapshots which an older
generation commits later can be told to be stale.

A lease also names the snapshot from which that older generation had resumed, and so on, back to a generation whose
number is a multiple of 64. The lease of such a generation names all snapshots before it, and the next lease repeats
them in case it is lost. So the lineage of a run is in two leases, however many attempts it had; manifests repeat it.
"""

import logging
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any
from uuid import uuid4

from midstride.engine.errors import SnapshotDamaged, Superseded
from midstride.engine.snapshots.parent import inherits
from midstride.engine.snapshots.position import lease_name, parse_name
from midstride.engine.storage.checksums import NUMBER, Kind, encode_document
from midstride.engine.storage.store import Store
from midstride.engine.storage.verification import read_required_document

__all__ = [
    "BLOCK",
    "WAYS_OUT",
    "Lease",
    "acquire",
    "ancestry",
    "ensure_newest",
    "generations",
    "lease_document",
    "lease_path",
    "leases",
    "newest",
    "newest_process",
    "read_lease",
]

log = logging.getLogger(__name__)

_FOLDER = "lease"
#: names as `lease_path` makes them
_NAME = re.compile(r"(\d{6}|[1-9]\d{6,17})\.json", re.ASCII)
#: the keys of a lease's document, and their types
_KINDS: dict[str, Kind] = {
    "generation": int,
    "resumed_from": (str, NoneType),
    "run_id": str,
    "ancestors": list,
    "facts": dict,
    "time": NUMBER,
}
#: a generation whose number is a multiple of this has its whole lineage in its lease, and so has the one after it
BLOCK = 64
#: where a lease is damaged or gone
WAYS_OUT = "`midstride snapshots repair` rebuilds it from the manifests; or start over under another run name."


@dataclass(frozen=True)
class Lease:
    """The right to advance a run.

    Args:
        generation: which attempt of the run this is, from 1.
        resumed_from: name of the snapshot it continues; None for a fresh start.
        run_id: what tells this run from any other of the same name; made by the first generation.
        ancestors: names of snapshots: `resumed_from`, the one from which its generation had resumed, and so on.
            The last is of a generation that is a multiple of `BLOCK`; if this generation or the one before is such a
            multiple, it is of the first generation.
    """

    generation: int
    resumed_from: str | None
    run_id: str = ""
    ancestors: tuple[str, ...] = ()


def leases(store: Store) -> list[Lease]:
    """Return every lease of the run in `store`, oldest first."""
    return [read_lease(store, generation) for generation in generations(store)]


def newest(store: Store) -> Lease | None:
    """Return the lease that counts; None before the first."""
    numbers = generations(store)
    return read_lease(store, numbers[-1]) if numbers else None


def newest_process(store: Store) -> tuple[dict[str, Any], float] | None:
    """Return the facts in the newest lease, and its time in seconds since the epoch; or None.

    The lease that a fork inherits tells of a process that advances the parent, so it does not count.

    Raises:
        SnapshotDamaged: it has unexpected content.
    """
    for generation in generations(store)[-1:]:
        if not inherits(store, lease_path(generation)):
            document = _lease_at(store, generation)
            return document["facts"], document["time"]
    return None


def acquire(store: Store, resumed_from: str | None, facts: dict[str, Any]) -> Lease:
    """Take the next generation; from now on older ones are superseded.

    Args:
        store: of the run.
        resumed_from: name of the snapshot this attempt continues, or None.
        facts: JSON values to keep beside, such as host and process.
    """
    while True:
        before = newest(store)
        number = before.generation + 1 if before else 1
        is_new = before is None or inherits(store, lease_path(before.generation))
        run_id = uuid4().hex if before is None or is_new else before.run_id
        lease = _with_ancestors(store, Lease(number, resumed_from, run_id))
        data = lease_document(lease, facts)
        path = lease_path(lease.generation)
        # A store may win for us, lose the answer, and refuse our second try: then the file there is ours.
        if store.create(path, data) or store.read(path) == data:
            _fence(store, path)
            return lease


def lease_document(lease: Lease, facts: dict[str, Any]) -> bytes:
    """Return `lease` and `facts` as a document; a nonce makes each document unique."""
    return encode_document({**vars(lease), "facts": facts, "time": time.time(), "nonce": uuid4().hex})


def ancestry(store: Store, lease: Lease) -> Iterator[str]:
    """Yield the name of the snapshot from which `lease` resumed, then of that one's origin, etc.

    Raises:
        SnapshotDamaged: a lease on the way is missing or has unexpected content.
    """
    generation = lease.generation
    while lease.resumed_from is not None:
        for name in lease.ancestors or (lease.resumed_from,):
            parsed = parse_name(name)
            if parsed is None or parsed[1] >= generation:
                raise SnapshotDamaged(
                    f"generation {generation} of {store.url} says it resumed from {name!r}, "
                    f"which is no snapshot of an older generation: {WAYS_OUT}"
                )
            generation = parsed[1]
            yield name
        if lease.ancestors and generation % BLOCK:
            return
        lease = read_lease(store, generation)


def _with_ancestors(store: Store, lease: Lease) -> Lease:
    names: list[str] = []
    for name in ancestry(store, lease):
        names.append(name)
        parsed = parse_name(name)
        if parsed and parsed[1] % BLOCK == 0 and lease.generation % BLOCK > 1:
            break
    return replace(lease, ancestors=tuple(names))


def _fence(store: Store, path: str) -> None:
    """Remove unfinished writes of older attempts, which check the lease before further ones."""
    store.remove_drafts("", "metrics")
    store.remove_drafts(_FOLDER, upto=path.rpartition("/")[2])  # others may be about to take the next one


def ensure_newest(store: Store, lease: Lease, *, is_read: bool = False) -> None:
    """Check that `lease` is still the newest, before replacing files that others read.

    A lease that was removed is written again: without it, no further snapshot of this world would count.

    Args:
        store: of the run.
        lease: of this world.
        is_read: whether the file of the lease is read, too: a lease of the same number may be that of another run.

    Raises:
        Superseded: a newer generation advances the run, or another run was begun in its place.
    """
    numbers = generations(store)
    if numbers and numbers[-1] == lease.generation and not is_read:
        return
    try:
        last = read_lease(store, numbers[-1]) if numbers else None
    except SnapshotDamaged:
        if numbers[-1] == lease.generation:
            return  # a world that resumes is told of it
        raise
    if last is not None and last.run_id != lease.run_id:
        raise Superseded(
            f"{store.url} was emptied and another run has started there: this attempt (generation "
            f"{lease.generation} of the earlier run) has stopped"
        )
    if last is not None and last.generation > lease.generation:
        raise Superseded(
            f"another attempt (generation {last.generation}) has taken over {store.url}: this one (generation "
            f"{lease.generation}) has stopped"
        )
    if last is None or last.generation < lease.generation:
        _write_again(store, lease)


def _write_again(store: Store, lease: Lease) -> None:
    path = lease_path(lease.generation)
    if store.create(path, lease_document(lease, {})):
        log.warning(
            "%s/%s was removed during training, and is written again. If the whole folder was removed, the files of "
            "earlier attempts are lost",
            store.url,
            path,
        )


def read_lease(store: Store, generation: int) -> Lease:
    """Return the lease of one generation.

    Raises:
        SnapshotDamaged: it is missing or has unexpected content, so which snapshots count is unknown.
    """
    document = _lease_at(store, generation)
    return Lease(generation, document["resumed_from"], document["run_id"], tuple(document["ancestors"]))


def _lease_at(store: Store, generation: int) -> dict[str, Any]:
    path = lease_path(generation)
    document = read_required_document(store, path, WAYS_OUT, **_KINDS)
    if document["generation"] != generation:
        where = f"{store.url}/{path}"
        raise SnapshotDamaged(f"{where} is the lease of generation {document['generation']}: {WAYS_OUT}")
    if wrong := [name for name in document["ancestors"] if not isinstance(name, str)]:
        raise SnapshotDamaged(f"{store.url}/{path} names {wrong[0]!r:.80} as a snapshot: {WAYS_OUT}")
    return document


def lease_path(generation: int) -> str:
    """Return where the lease of `generation` lies in a run."""
    return f"{_FOLDER}/{lease_name(generation)}"


def generations(store: Store) -> list[int]:
    """Return the generations that have a lease, whole or not, oldest first."""
    return sorted(int(name.removesuffix(".json")) for name in store.list(_FOLDER) if _NAME.fullmatch(name))
