"""Lineage: which generations of a run count, and how far. Needs no torch.

Of the newest generation everything counts; of the one it resumed from, all up to the snapshot it resumed from; and
so on back to the first. What a stale world commits later lies beyond that, and is never read.
"""

from dataclasses import dataclass, field

from midstride.engine.errors import SnapshotDamaged
from midstride.engine.snapshots.lease import Lease, newest, read_lease
from midstride.engine.snapshots.place import Place, parse_name
from midstride.engine.snapshots.store import Store

__all__ = ["Lineage"]


@dataclass(frozen=True)
class Lineage:
    """The generations that led to the newest one.

    Args:
        run_id: of the run; empty while it has no lease.
        ends: generation -> last place of it that counts; None for all of it.
    """

    run_id: str = ""
    ends: dict[int, Place | None] = field(default_factory=dict)

    @classmethod
    def of(cls, store: Store) -> "Lineage":
        """Follow the leases of the run in `store` from the newest one back."""
        lease = newest(store)
        if lease is None:
            return cls()
        lineage = cls(lease.run_id, {lease.generation: None})
        while lease.resumed_from is not None:
            place, generation = _parent(store, lease, lease.resumed_from)
            lineage.ends[generation] = place
            lease = read_lease(store, generation)
        return lineage

    def holds(self, name: str) -> bool:
        """Whether the snapshot called `name` would count if it were committed."""
        parsed = parse_name(name)
        if parsed is None:
            return False
        place, generation = parsed
        if not self.ends:
            return True  # a run without leases: nobody can have superseded anybody
        end = self.ends.get(generation, Place(-1))
        return end is None or place <= end


def _parent(store: Store, lease: Lease, name: str) -> tuple[Place, int]:
    parsed = parse_name(name)
    if parsed is None or parsed[1] >= lease.generation:
        raise SnapshotDamaged(
            f"generation {lease.generation} of {store.url} says it resumed from {name!r}, "
            "which is no snapshot of an older generation. Start over under another run name."
        )
    return parsed
