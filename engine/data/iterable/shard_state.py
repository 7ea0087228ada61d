"""Requests to the shards of a stream, their answers, and the states that they can go on from."""

from typing import Any, NamedTuple

__all__ = ["ShardAnswer", "ShardExhausted", "ShardRequest", "ShardState", "add_marks"]


class ShardState(NamedTuple):
    """A state that a shard can go on from.

    Args:
        batch: batches of the shard read before it was taken.
        next_at: the batch with which the next one will be taken.
        data: the state, pickled.
        digest: of the samples of those batches; None if it was not kept.
        total: sum of their marks; None if it was not kept.
    """

    batch: int
    next_at: int
    data: bytes
    digest: int | None = None
    total: int | None = None


class ShardRequest(NamedTuple):
    """A request for a batch of a shard.

    Args:
        number: of the pass over the data, so that one broken off is not mistaken for the next.
        epoch: decides the random numbers.
        shard: of the data.
        batch: of the shard.
        state: to go on from, with the shard's first request in a resumed pass; else None.
        digest: of the samples before the batch, with that request; None if it was not kept.
    """

    number: int
    epoch: int
    shard: int
    batch: int
    state: ShardState | None
    digest: int | None = None


class ShardExhausted(NamedTuple):
    """The answer of a shard that has no batch left."""


class ShardAnswer(NamedTuple):
    """A batch, and what was read of the shard up to it.

    Args:
        batch: as collate made it.
        digest: of all samples of the shard up to here; None if it was not kept.
        states: that were taken on the way, as they were due.
        mark: digest of the samples of this batch and of where it stands; None if it was not kept.
        total: sum of the marks of all batches up to here; None if it was not kept.
    """

    batch: Any
    digest: int | None
    states: list[ShardState]
    mark: int | None
    total: int | None


def add_marks(total: int, mark: int) -> int:
    """Return the sum of marks, in 64 bits."""
    return (total + mark) & ((1 << 64) - 1)
