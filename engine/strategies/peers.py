"""Proves that peers of a group are ranks of the run, before a pickle of theirs is read.

gloo listens on the loopback, where another user of the machine can connect in place of a rank. The ranks themselves
meet in a file that only their user can open, and each group has a key there. Each pair of ranks exchanges an HMAC under
that key, as plain bytes.
"""

import hmac
import secrets
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from midstride.engine.errors import WorldError
from midstride.engine.strategies.torch_internals import Store

__all__ = ["check_gathered", "check_peers"]

_KEY = "midstride/key"


def check_peers(group: Any, store: Store) -> None:
    """Check that the other members of `group` know the key in `store`; all members call this.

    Args:
        group: a process group with gloo for tensors on the host.
        store: private to the ranks, and to this group.

    Raises:
        WorldError: a process has connected that does not know it.
    """
    rank, others = group.rank(), [other for other in range(group.size()) if other != group.rank()]
    key = _shared_key(store)
    received = {other: torch.zeros(32, dtype=torch.uint8) for other in others}
    works = [group.send([_tensor(_proof(key, rank, other))], other, 0) for other in others]
    works += [group.recv([received[other]], other, 0) for other in others]
    for work in works:
        work.wait()
    for other in others:
        _verify(received[other].numpy().tobytes(), _proof(key, other, rank), rank, other)


def check_gathered(rank: int, store: Store, gather: Callable[[bytes], list[bytes]]) -> None:
    """Check the same of ranks that have collective operations alone; all ranks call this.

    Args:
        rank: this one.
        store: private to the ranks.
        gather: returns the bytes of all ranks, in the order of ranks.

    Raises:
        WorldError: a process takes part that does not know the key in `store`.
    """
    key = _shared_key(store)
    for other, proof in enumerate(gather(_proof(key, rank, rank))):
        _verify(proof, _proof(key, other, other), rank, other)


def _shared_key(store: Store) -> bytes:
    return bytes(store.compare_set(_KEY, "", secrets.token_hex(32)))  # that of the fastest rank


def _proof(key: bytes, sender: int, receiver: int) -> bytes:
    return hmac.digest(key, f"{sender}/{receiver}".encode(), "sha256")


def _tensor(proof: bytes) -> Tensor:
    return torch.frombuffer(bytearray(proof), dtype=torch.uint8)


def _verify(proof: bytes, expected: bytes, rank: int, other: int) -> None:
    if not hmac.compare_digest(proof, expected):
        raise WorldError(
            f"a foreign process has connected to rank {rank} of a group in place of rank {other}. "
            "Another user of this machine may try to take part. Nothing that it sent was used; repeat the command"
        )
