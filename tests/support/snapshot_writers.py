"""Writers of one rank for tests of snapshots, closed when the test ends."""

from typing import Any

import torch

from midstride.engine.snapshots.buffer_pool import Buffer
from midstride.engine.snapshots.catalog import Position, Snapshot
from midstride.engine.snapshots.committer import Committer, SnapshotRequest
from midstride.engine.snapshots.lease import Lease, acquire, newest
from midstride.engine.snapshots.state_copy import StateCopier
from midstride.engine.snapshots.writer import Writer
from midstride.engine.storage.store import Store
from midstride.engine.world import World


def state_at(step: int) -> dict[str, Any]:
    weight = torch.full((4, 3), float(step))
    return {
        "progress": {"step": step},
        "module": {"weight": weight, "tied": weight},
        "lr": (0.1, step),
        "keys": {1: step},
    }


OPEN: list[Writer] = []


def open_writer(*args: Any) -> Writer:
    OPEN.append(Writer(*args))
    return OPEN[-1]


def alone(store: Store, resumed_from: str | None = None, *, keep: int = 100) -> Writer:
    return open_writer(store, acquire(store, resumed_from, {}), World(), lambda value: [value], "digits", keep)


def take(writer: Writer, *steps: int, **changes: Any) -> list[Snapshot]:
    taken = [
        writer.take(Position(step), state_at(step), f"{step},row\n", {"threads": 1}, **changes).future.result()
        for step in steps
    ]
    writer.flush()  # old ones are gone, too
    return taken


def save_weights(store: Store, folder: str, state_dict: dict[str, Any], facts: dict[str, Any], take: int = 1) -> None:
    """Commit weights at the step in `facts`, in the newest generation."""
    committer = Committer(store, newest(store) or Lease(1, None), World(), lambda value: [value], "digits")
    state = StateCopier(World(), lambda path: False).copy(state_dict, Buffer())
    request = SnapshotRequest(Position(facts.get("step", 0)), state, facts, folder=folder, take=take)
    try:
        committer.commit(request, before=lambda: None)
    finally:
        committer.close()
