"""What is asked of the shards of a stream, and states of where they stand."""

from typing import Any, NamedTuple

__all__ = ["ShardAnswer", "ShardExhausted", "ShardRequest", "ShardState", "added"]


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
    """A batch that is wanted.

    Args:
        number: of the pass over the data, so that one broken off is not mistaken for the next.
        epoch: decides the random numbers.
        shard: of the data.
        batch: of the shard.
        state: with the first batch of a resumed pass, where to go on from.
        digest: with the first batch of a resumed pass, of the samples before it; None if it was not kept.
    """

    number: int
    epoch: int
    shard: int
    batch: int
    state: ShardState | None
    digest: int | None = None


class ShardExhausted(NamedTuple):
    """The answer where a shard has no batch left."""


class ShardAnswer(NamedTuple):
    """A batch, and what was read of the shard up to it.

    Args:
        batch: as collate made it.
        digest: of all samples of the shard up to here; None if it was not kept.
        states: that were due.
        mark: digest of the samples of this batch and of where it stands; None if it was not kept.
        total: sum of the marks of all batches up to here; None if it was not kept.
    """

    batch: Any
    digest: int | None
    states: list[ShardState]
    mark: int | None
    total: int | None


def added(total: int, mark: int) -> int:
    """Return the sum of marks, in 64 bits."""
    return (total + mark) & ((1 << 64) - 1)
