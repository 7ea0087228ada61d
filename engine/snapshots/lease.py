"""Leases: which generation of a run may write. Needs no torch.

Every life of a run is a generation, and takes its number by creating `lease/NNNNNN.json` exclusively. The newest
one counts. It says from which snapshot it resumed, so what an older one writes later is known to be stale.
"""

import time
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from midstride.engine.errors import SnapshotDamaged, Superseded
from midstride.engine.snapshots.checksums import seal, unseal
from midstride.engine.snapshots.store import Store

__all__ = ["Lease", "acquire", "ensure_newest", "leases", "newest", "read_lease", "superseded_by"]

_FOLDER = "lease"
#: folders in which a world replaces files, beside the run's own
_REPLACED = (_FOLDER, "best", "last", "metrics")


@dataclass(frozen=True)
class Lease:
    """The right to advance a run.

    Args:
        generation: which life of the run this is, from 1.
        resumed_from: name of the snapshot it continues; None for a fresh start.
        run_id: what tells this run from any other of the same name; made by the first generation.
    """

    generation: int
    resumed_from: str | None
    run_id: str = ""


def leases(store: Store) -> list[Lease]:
    """Return every lease of the run in `store`, oldest first."""
    return [read_lease(store, generation) for generation in _generations(store)]


def newest(store: Store) -> Lease | None:
    """Return the lease that counts; None before the first."""
    numbers = _generations(store)
    return read_lease(store, numbers[-1]) if numbers else None


def acquire(store: Store, resumed_from: str | None, facts: dict[str, Any]) -> Lease:
    """Take the next generation; from now on older ones are superseded.

    Args:
        store: of the run.
        resumed_from: name of the snapshot this life continues, or None.
        facts: JSON values to keep beside, such as host and process.
    """
    while True:
        before = newest(store)
        lease = Lease(
            generation=before.generation + 1 if before else 1,
            resumed_from=resumed_from,
            run_id=before.run_id if before else uuid4().hex,
        )
        data = seal({**vars(lease), "facts": facts, "time": time.time(), "nonce": uuid4().hex})
        path = _path(lease.generation)
        # A store may win for us, lose the answer, and refuse our second try: then the file there is ours.
        if store.create(path, data) or store.read(path) == data:
            _fence(store)
            return lease


def _fence(store: Store) -> None:
    """Let no write of an older world end that it began before the lease was taken; what it begins now it asks for."""
    store.remove_drafts("", *_REPLACED)


def superseded_by(store: Store, lease: Lease) -> Lease | None:
    """Return the lease that took over from `lease`; None while it is the newest."""
    numbers = _generations(store)
    return read_lease(store, numbers[-1]) if numbers and numbers[-1] > lease.generation else None


def ensure_newest(store: Store, lease: Lease) -> None:
    """Look whether `lease` still counts; a world asks before it replaces anything that others read.

    Raises:
        Superseded: a newer generation advances the run.
    """
    if newer := superseded_by(store, lease):
        raise Superseded(
            f"generation {newer.generation} advances {store.url} now, this world is generation {lease.generation}: "
            "it stops"
        )


def read_lease(store: Store, generation: int) -> Lease:
    """Return the lease of one generation.

    Raises:
        SnapshotDamaged: it is missing or not what was written, so nobody can say which snapshots count.
    """
    path = _path(generation)
    where = f"{store.url}/{path}"
    try:
        document = unseal(store.read(path), where)
    except FileNotFoundError as error:
        raise SnapshotDamaged(f"{where} is missing. Put it back, or start over under another run name.") from error
    except SnapshotDamaged as error:
        raise SnapshotDamaged(f"{error}. Put it back, or start over under another run name.") from error
    return Lease(document["generation"], document["resumed_from"], document["run_id"])


def _path(generation: int) -> str:
    return f"{_FOLDER}/{generation:06d}.json"


def _generations(store: Store) -> list[int]:
    stems = (name.removesuffix(".json") for name in store.list(_FOLDER) if name.endswith(".json"))
    return sorted(int(stem) for stem in stems if stem.isdigit())
