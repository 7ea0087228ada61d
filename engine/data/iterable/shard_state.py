"""Requests to the shards of a stream, their answers, and states to resume from."""

from typing import Any, NamedTuple

__all__ = ["ShardAnswer", "ShardExhausted", "ShardRequest", "ShardState", "add_marks"]


class ShardState(NamedTuple):
    """A state that a shard can resume from.

    Args:
        batch: number of batches of the shard that were read before.
        next_at: number of batches at which the next state is taken.
        data: the state, pickled.
        digest: digest of the samples of those batches.
        total: sum of the marks of those batches.
    """

    batch: int
    next_at: int
    data: bytes
    digest: int
    total: int


class ShardRequest(NamedTuple):
    """A request for a batch of a shard.

    Args:
        number: number of the pass over the data in this process, which differs for an abandoned pass and the next.
        epoch: epoch, which decides the random numbers.
        shard: number of the shard.
        batch: index of the batch in the shard.
        state: state to resume from, in the first request to a shard in a resumed pass; else None.
        digest: digest of the samples before the batch, in that request; else None.
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
    """A batch of a shard.

    Args:
        batch: the result of collate_fn.
        digest: digest of all samples of the shard up to here.
        states: states that were due and taken since the last answer.
        mark: digest of the samples of this batch and of its position.
        total: sum of the marks of all batches up to here.
        samples: number of samples of this batch; None if the data set gives whole batches.
    """

    batch: Any
    digest: int
    states: list[ShardState]
    mark: int
    total: int
    samples: int | None


def add_marks(total: int, mark: int) -> int:
    """Return the sum modulo 2**64."""
    return (total + mark) & ((1 << 64) - 1)
