"""What is asked of the shards of a stream, and states of where they stand."""

from typing import NamedTuple

__all__ = ["ShardExhausted", "ShardRequest", "ShardState"]


class ShardState(NamedTuple):
    """A state that a shard can go on from.

    Args:
        batch: batches of the shard read before it was taken.
        next_at: the batch with which the next one will be taken.
        data: the state, pickled.
        digest: of the samples of those batches; None if it was not kept.
    """

    batch: int
    next_at: int
    data: bytes
    digest: int | None = None


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
