"""Lineage: which generations of a run count, and how far. Needs no torch.

All snapshots of the newest generation count; of the generation that it resumed from, those up to the snapshot it
resumed from; and so on, back to the first. What a stale world commits later comes after that, and is never read.
"""

from dataclasses import dataclass, field

from midstride.engine.errors import SnapshotDamaged
from midstride.engine.snapshots.lease import WAYS_OUT, Lease, ancestry, lease_path, newest, read_lease
from midstride.engine.snapshots.position import Position, parse_name
from midstride.engine.storage.store import Store

__all__ = ["Lineage"]


@dataclass(frozen=True)
class Lineage:
    """The generations that led to the newest one.

    Args:
        run_id: of the run; empty while it has no lease.
        ends: generation -> last position of it that counts; None for all of it.
    """

    run_id: str = ""
    ends: dict[int, Position | None] = field(default_factory=dict)

    @classmethod
    def of(cls, store: Store) -> "Lineage":
        """Follow the leases of the run in `store` from the newest one back.

        Raises:
            SnapshotDamaged: a lease is missing or has unexpected content, so which snapshots count is unknown.
        """
        lease = newest(store)
        while late := _committed_after(store, lease):
            if (newer := newest(store)) == lease:
                path = f"{store.url}/{lease_path(late[1])}"
                raise SnapshotDamaged(f"{path} is missing, and snapshot {late[0]} is of that generation: {WAYS_OUT}")
            lease = newer
        if lease is None:
            return cls()
        parsed = (parse_name(name) for name in ancestry(store, lease))
        return cls(lease.run_id, {lease.generation: None, **{one[1]: one[0] for one in parsed if one}})

    @classmethod
    def up_to(cls, store: Store, name: str) -> "Lineage":
        """Follow the leases from that of the snapshot `name` back, as a fork of it does.

        Raises:
            SnapshotDamaged: a lease is missing or has unexpected content.
        """
        parsed = parse_name(name)
        if parsed is None:
            return cls()
        lease = read_lease(store, parsed[1])
        before = (parse_name(one) for one in ancestry(store, lease))
        return cls(lease.run_id, {one[1]: one[0] for one in (parsed, *before) if one})

    def holds(self, name: str) -> bool:
        """Whether the snapshot called `name` would count if it were committed."""
        parsed = parse_name(name)
        if parsed is None:
            return False
        position, generation = parsed
        if not self.ends:
            return True  # a run without leases: none can have superseded another
        end = self.ends.get(generation, Position(-1))
        return end is None or position <= end


def _committed_after(store: Store, lease: Lease | None) -> tuple[str, int] | None:
    """Return name and generation of a snapshot committed after `lease` was superseded, if any."""
    for name in reversed(store.list("snapshots")):
        parsed = parse_name(name)
        if (
            parsed
            and parsed[1] > (lease.generation if lease else 0)
            and store.exists(f"snapshots/{name}/manifest.json")
        ):
            return name, parsed[1]
    return None
