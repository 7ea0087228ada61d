"""Order of shards in a pass, the position in each, and requests for their batches."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from midstride.engine.data.iterable.shard_state import ShardAnswer, ShardRequest, ShardState

__all__ = ["PassPosition", "ShardBatch", "ShardRequestSampler", "shard_rotation"]


class ShardBatch(NamedTuple):
    """A batch that was read, with the change of the position when the loop takes it.

    Args:
        answer: the batch.
        shard: shard of the batch.
        ended: shards that ended before this batch.
    """

    answer: ShardAnswer
    shard: int
    ended: tuple[int, ...]


@dataclass
class PassPosition:
    """The position of this rank in a pass.

    Args:
        read: number of batches that the loop has taken, by shard.
        ended: whether the shard has ended, by shard.
        turn: shard of the next batch.
        states: newest state by shard.
        digests: digest of all samples read, by shard.
        totals: sum of the marks of all batches read, by shard.
        had_states: whether there was a state in this pass.
        earlier_states: the state before the newest one, by shard.
    """

    read: list[int]
    ended: list[bool]
    turn: int = 0
    states: dict[int, ShardState] = field(default_factory=dict)
    digests: list[int] = field(default_factory=list)
    earlier_states: dict[int, ShardState] = field(default_factory=dict)
    totals: list[int] = field(default_factory=list)
    had_states: bool = False

    @classmethod
    def start(cls, shards: int) -> "PassPosition":
        """Return the position at the start of a pass."""
        return cls([0] * shards, [False] * shards, digests=[0] * shards, totals=[0] * shards)

    def consume(self, turn: ShardBatch) -> None:
        """Advance the position by a batch that the loop takes."""
        self.read[turn.shard] += 1
        self.turn = (turn.shard + 1) % len(self.read)
        self.digests[turn.shard], self.totals[turn.shard] = turn.answer.digest, turn.answer.total
        self.had_states |= bool(turn.answer.states)
        for saved in turn.answer.states:
            if turn.shard in self.states:
                self.earlier_states[turn.shard] = self.states[turn.shard]
            self.states[turn.shard] = ShardState(*saved)
        for shard in turn.ended:
            self.ended[shard] = True
            self.states.pop(shard, None)
            self.earlier_states.pop(shard, None)

    def resume_states(self) -> dict[int, ShardState]:
        """Return, by shard, the newest state with a batch after it, which a resume compares."""
        newest = {shard: saved for shard, saved in self.states.items() if saved.batch < self.read[shard]}
        return {**self.earlier_states, **newest}

    def batches_to_replay(self) -> int:
        """Return the number of batches that a resume has to read again to get to this position."""
        starts = self.resume_states()
        return sum(
            read - (starts[shard].batch if shard in starts else 0)
            for shard, (read, ended) in enumerate(zip(self.read, self.ended, strict=True))
            if not ended
        )


def shard_rotation(position: PassPosition, workers: int) -> Iterator[int | None]:
    """Yield the shards in the order of their batches, without end.

    None is a request without a shard. torch gives requests to workers in turn, and all requests to a shard have to go
    to the same worker.
    """
    shards = len(position.read)
    lap = -(-shards // workers) * workers if workers else shards
    for turn in count(0 if workers else position.turn):
        shard = turn % lap
        yield shard if shard < shards and turn >= position.turn else None


class ShardRequestSampler:
    """The sampler of the loader: its indices are requests for batches, without end."""

    def __init__(self) -> None:
        self._requests: Iterator[ShardRequest | None] = iter(())

    def begin(self, number: int, epoch: int, position: PassPosition, turns: Iterator[int | None]) -> None:
        """Set the requests of pass `number` for batches after `position`, by the shards in `turns`."""
        self._requests = self._iterate(
            number, epoch, list(position.read), _resume_points(position), list(position.ended), turns
        )

    def __iter__(self) -> Iterator[ShardRequest | None]:
        return self._requests

    @staticmethod
    def first_of_each(number: int, epoch: int, position: PassPosition) -> Iterator[ShardRequest]:
        """Yield the first request to each shard that has not ended."""
        resumed = _resume_points(position)
        for shard, read in enumerate(position.read):
            if not position.ended[shard]:
                yield ShardRequest(number, epoch, shard, read, *resumed.get(shard, (None, None)))

    @staticmethod
    def _iterate(
        number: int,
        epoch: int,
        read: list[int],
        resumed: dict[int, tuple[ShardState | None, int | None]],
        ended: list[bool],
        turns: Iterator[int | None],
    ) -> Iterator[ShardRequest | None]:
        for shard in turns:
            if shard is None or ended[shard]:
                yield None
            else:
                yield ShardRequest(number, epoch, shard, read[shard], *resumed.pop(shard, (None, None)))
                read[shard] += 1


def _resume_points(position: PassPosition) -> dict[int, tuple[ShardState | None, int | None]]:
    """Return, by shard, the state to resume from and the digest of the samples read."""
    starts = position.resume_states()
    return {shard: (starts.get(shard), position.digests[shard]) for shard, read in enumerate(position.read) if read}
