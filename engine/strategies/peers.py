"""The ranks of a job on one machine meet in a file of the session, and prove to each other that they have read it.

gloo listens on the loopback, where any local user can connect in place of a rank, and the ranks exchange pickles. So
each pair of ranks exchanges a proof before any pickle: an HMAC of the group and both ranks, with a key from that file.
"""

import hmac
import os
import secrets
from pathlib import Path

import torch
import torch.distributed as dist

from midstride.engine.errors import WorldError
from midstride.engine.processes.loopback import MEETING
from midstride.engine.strategies.torch_internals import Store

__all__ = ["check_peers", "private_store"]

_KEY = "midstride/peers"


def private_store() -> Store | None:
    """Return a store in the file that the launcher has named to the ranks of this machine; None if it has not.

    The name is used once: programs that a rank starts do not get it.
    """
    file = os.environ.pop(MEETING, "")
    return dist.FileStore(str(Path(file)), -1) if file else None


def check_peers(store: Store, name: str, group: dist.ProcessGroup | None = None) -> None:
    """Check that the processes behind the connections of a group are the ranks that use `store`.

    Args:
        store: private to the ranks.
        name: of the group; all ranks give the same.
        group: all of whose ranks call this; None for the default group.

    Raises:
        WorldError: another process has connected in place of a rank.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank == 0 and name == "":
        store.set(_KEY, secrets.token_hex(32))
    key = bytes(store.get(_KEY))
    others = [other for other in range(size) if other != rank]
    received = {other: torch.zeros(32, dtype=torch.uint8) for other in others}
    works = [dist.isend(_proof(key, name, rank, other), group=group, group_dst=other) for other in others]
    works += [dist.irecv(received[other], group=group, group_src=other) for other in others]
    for work in works:
        if work is not None:
            work.wait()
    for other in others:
        if not hmac.compare_digest(_bytes(received[other]), _bytes(_proof(key, name, other, rank))):
            raise WorldError(
                f"a process that is no rank of this run has connected to rank {rank} in place of rank {other}: another "
                "user of this machine may try to take part. Nothing it sent was used"
            )


def _proof(key: bytes, name: str, sender: int, receiver: int) -> torch.Tensor:
    digest = hmac.digest(key, f"{name}/{sender}/{receiver}".encode(), "sha256")
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def _bytes(proof: torch.Tensor) -> bytes:
    return proof.numpy().tobytes()
