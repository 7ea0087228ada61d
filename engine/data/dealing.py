"""Shards dealt like cards: whose batch is next, what was read of each, what is asked for."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from midstride.engine.data.shards import Ask, Note

__all__ = ["Asks", "Place", "Turn", "shards_in_turn"]


class Turn(NamedTuple):
    """A batch on its way to the loop, and how the place changes once it is there."""

    batch: Any
    shard: int
    note: Note | None
    ended: tuple[int, ...]


@dataclass
class Place:
    """What this rank has consumed of a pass.

    Args:
        read: batches, by shard.
        ended: whether there are no more, by shard.
        turn: the shard whose batch is next.
        notes: the newest state to go on from, by shard.
    """

    read: list[int]
    ended: list[bool]
    turn: int = 0
    notes: dict[int, Note] = field(default_factory=dict)

    @classmethod
    def start(cls, shards: int) -> "Place":
        """Return that of a pass of which nothing was read."""
        return cls([0] * shards, [False] * shards)

    def consumed(self, turn: Turn) -> None:
        """Move on by one turn."""
        self.read[turn.shard] += 1
        self.turn = (turn.shard + 1) % len(self.read)
        if turn.note is not None:
            self.notes[turn.shard] = Note(*turn.note)
        for shard in turn.ended:
            self.ended[shard] = True
            self.notes.pop(shard, None)

    def behind(self) -> int:
        """Return how many batches have to be read again to come back here."""
        return sum(
            read - (self.notes[shard].batch if shard in self.notes else 0)
            for shard, (read, ended) in enumerate(zip(self.read, self.ended, strict=True))
            if not ended
        )


def shards_in_turn(place: Place, workers: int) -> Iterator[int | None]:
    """Yield whose turn it is, None for nobody's: torch deals to its workers in turn, and a shard keeps its worker."""
    shards = len(place.read)
    lap = -(-shards // workers) * workers if workers else shards
    for turn in count(0 if workers else place.turn):
        shard = turn % lap
        yield shard if shard < shards and turn >= place.turn else None


class Asks:
    """The sampler: what is asked for, in turn, without end."""

    def __init__(self) -> None:
        self._asks: Iterator[Ask | None] = iter(())

    def begin(self, number: int, epoch: int, place: Place, turns: Iterator[int | None]) -> None:
        """Ask for what comes after `place`."""
        self._asks = self._of(number, epoch, list(place.read), dict(place.notes), list(place.ended), turns)

    def __iter__(self) -> Iterator[Ask | None]:
        return self._asks

    @staticmethod
    def _of(
        number: int,
        epoch: int,
        read: list[int],
        notes: dict[int, Note],
        ended: list[bool],
        turns: Iterator[int | None],
    ) -> Iterator[Ask | None]:
        for shard in turns:
            if shard is None or ended[shard]:
                yield None
            else:
                yield Ask(number, epoch, shard, read[shard], notes.pop(shard, None))
                read[shard] += 1
