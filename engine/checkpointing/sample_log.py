"""Log of samples: batches of each epoch that were trained, over all attempts of a run.

It is part of a run's state, so batches after the last snapshot are dropped by a resume, and recorded again when the
next attempt trains on them. An epoch takes one entry, however long it is: a range of batches, a number of samples, and
a digest of their indices, which `midstride audit` compares with the digest of the order of the epoch.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from xxhash import xxh3_64_intdigest

from midstride.engine.data.bad_samples import ON_REQUEST

__all__ = ["BatchRange", "SampleLog", "digest_of"]

_MASK = (1 << 64) - 1


@dataclass
class BatchRange:
    """Consecutive batches of one epoch, over all ranks.

    Args:
        epoch: the epoch, from 0.
        first: the first batch.
        end: the batch after the last one.
        world: number of ranks that shared each batch.
        samples: number of samples.
        digest: sum modulo 2**64 of `digest_of` for each batch of each rank, or of the marks of iterable data sets.
        indexed: whether samples have indices; samples of iterable data sets have none.
    """

    epoch: int
    first: int
    end: int
    world: int
    samples: int = 0
    digest: int = 0
    indexed: bool = True

    def joins(self, other: "BatchRange") -> bool:
        """Return whether `other` starts where this range ends."""
        return (self.epoch, self.end, self.world, self.indexed) == (
            other.epoch,
            other.first,
            other.world,
            other.indexed,
        )

    def join(self, other: "BatchRange") -> None:
        """Extend this range by `other`, which starts at its end."""
        self.end = other.end
        self.add(other)

    def add(self, other: "BatchRange") -> None:
        """Add another rank's share of the same batches."""
        self.samples += other.samples
        self.digest = (self.digest + other.digest) & _MASK


def digest_of(indices: Sequence[int], batch: int, rank: int) -> int:
    """Return a hash of the samples of one batch of one rank, in order."""
    return xxh3_64_intdigest(array("q", indices).tobytes(), (batch << 20 | rank) & _MASK)


class SampleLog:
    """Log of trained samples, a part of a run's state that is equal on all ranks.

    Args:
        rank: this rank among the ranks that read different samples.
        world: number of those ranks.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._merged: list[BatchRange] = []
        #: epoch and batch of batches that were left out because their loss was not finite
        self.left_out: list[tuple[int, int]] = []
        #: epoch, batch, rank, index and error of samples that could not be read, over all ranks
        self.bad: list[tuple[int, int, int, str, str]] = []
        self._open_bad: list[tuple[int, int, int, str, str]] = []
        #: number of batches left out since the last one that was trained on
        self.left_out_in_a_row = 0
        #: epoch and batch of batches that `skip_batches` left out
        self.skipped: list[tuple[int, int]] = []
        #: number of steps that these would have been
        self.skipped_steps = 0
        self._open: list[BatchRange] = []
        #: epoch -> batches that sampler or stream gave this rank; `merge_ranks` moves them, of all ranks, to `_planned`
        self._plans: dict[int, BatchRange] = {}
        self._planned: list[BatchRange] = []
        #: epochs in which data of some rank had states of their own, from which an attempt may have resumed
        self._stateful: set[int] = set()
        #: epochs that a stop broke off before their last batch
        self._broken_off: list[int] = []

    def plan(self, epoch: int, batches: Iterable[Sequence[Any]]) -> None:
        """Record the batches planned by a sampler for this rank, to compare trained ones with them."""
        plan = BatchRange(epoch, 0, 0, self._world)
        for batch, given in enumerate(batches):
            for rank, indices in (given if isinstance(given, dict) else {self._rank: given}).items():
                if {*map(type, indices)} != {int}:
                    return
                plan.samples += len(indices)
                plan.digest = (plan.digest + digest_of(indices, batch, rank)) & _MASK
            plan.end = batch + 1
        self._plans[epoch] = plan

    def note_read(self, epoch: int, batches: int, digest: int, *, stateful: bool) -> None:
        """Record the batches that this rank read from an iterable data set, `stateful` or not."""
        self._stateful |= {epoch} if stateful else set()
        self._plans[epoch] = BatchRange(epoch, 0, batches, self._world, digest=digest, indexed=False)

    def record(
        self,
        epoch: int,
        batch: int,
        indices: Sequence[int] | None,
        samples: int,
        lane: int | None = None,
        mark: int | None = None,
    ) -> None:
        """Record a batch of this rank, or of one of its lanes, that reaches the training step.

        Args:
            epoch: epoch, from 0.
            batch: index of the batch in the epoch.
            indices: indices of its samples in the data set, in order; None if they have none.
            samples: number of samples.
            lane: number of the lane, which takes the place of the rank in digests; None without lanes.
            mark: digest of samples without indices.
        """
        open_ = self._open
        end = (open_[-1].epoch, open_[-1].end) if open_ else None
        if end != (epoch, batch) and (lane is None or end != (epoch, batch + 1)):
            open_.append(BatchRange(epoch, batch, batch, self._world, indexed=indices is not None))
        current = open_[-1]
        current.end = batch + 1
        current.samples += samples
        if indices is not None:
            rank = self._rank if lane is None else lane
            current.digest = (current.digest + digest_of(indices, batch, rank)) & _MASK
        elif mark is not None:
            current.digest = (current.digest + mark) & _MASK

    def skip(self, epoch: int, batch: int) -> None:
        """Record a batch left out of training on every rank, in addition to `record`."""
        self.left_out.append((epoch, batch))
        self.left_out_in_a_row += 1

    def skip_on_request(self, epoch: int, batch: int, *, ends_step: bool) -> None:
        """Record a batch that `skip_batches` left out, in addition to `record`."""
        self.skipped.append((epoch, batch))
        self.skipped_steps += ends_step

    def rollback_point(self) -> Callable[[], None]:
        """Return a function that forgets the batches left out from now on."""
        left_out, in_a_row = list(self.left_out), self.left_out_in_a_row

        def back() -> None:
            self.left_out, self.left_out_in_a_row = left_out, in_a_row

        return back

    def note_bad(self, epoch: int, batch: int, rank: int, index: str, error: str) -> None:
        """Record a sample that could not be read, and was left out of this batch of `rank`."""
        self._open_bad.append((epoch, batch, rank, index, error))

    def bad_samples(self) -> dict[str, str]:
        """Return the recorded unreadable samples with their errors."""
        return {one[3]: one[4] for one in (*self.bad, *self._open_bad) if one[4] != ON_REQUEST}

    def break_off(self, epoch: int) -> None:
        """Record that training was stopped within `epoch`, and its rest is left out on all ranks."""
        self._broken_off.append(epoch)

    def keep(self) -> None:
        """Record that the last batch is trained on."""
        self.left_out_in_a_row = 0

    def merge_ranks(self, gather: Callable[[object], list[Any]]) -> None:
        """Merge the shares of the ranks; every rank calls this at the same point."""
        # Several ranks may read the same samples.
        everyone = gather((self._rank, self._plans, self._open, self._stateful, self._open_bad))
        self._stateful = set().union(*(one[3] for one in everyone))
        self.bad, self._open_bad = sorted({*self.bad, *(bad for one in everyone for bad in one[4])}), []
        readers = {one[0]: (one[1], one[2]) for one in everyone}
        first, *others = [plans for plans, _ in readers.values()]
        for epoch, whole in first.items():
            if all(epoch in plans for plans in others):
                for plans in others:
                    whole.add(plans[epoch])
                self._planned.append(whole)
        self._plans = {}
        for shares in zip(*(shares for _, shares in readers.values()), strict=True):
            whole = shares[0]
            for share in shares[1:]:
                whole.add(share)
            if self._merged and self._merged[-1].joins(whole):
                self._merged[-1].join(whole)
            else:
                self._merged.append(whole)
        self._open = []

    def state_dict(self) -> dict[str, Any]:
        """Return the log as of the last `merge_ranks`."""
        state: dict[str, Any] = {"stretches": [astuple(one) for one in self._merged], "left_out": list(self.left_out)}
        state |= {"planned": [astuple(one) for one in self._planned]} if self._planned else {}
        state |= {"left_out_in_a_row": self.left_out_in_a_row} if self.left_out_in_a_row else {}
        state |= {"skipped": [list(self.skipped), self.skipped_steps]} if self.skipped else {}
        state |= {"broken_off": list(self._broken_off)} if self._broken_off else {}
        state |= {"bad_samples": [list(one) for one in self.bad]} if self.bad else {}
        return {**state, "stateful": sorted(self._stateful)} if self._stateful else state

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the log, and drop batches that were not merged."""
        self._merged = [BatchRange(*one) for one in state_dict["stretches"]]
        self._planned = [BatchRange(*one) for one in state_dict.get("planned", ())]
        self._stateful = set(state_dict.get("stateful", ()))
        self._broken_off = list(state_dict.get("broken_off", ()))
        self.left_out_in_a_row = state_dict.get("left_out_in_a_row", 0)
        skipped, self.skipped_steps = state_dict.get("skipped", ((), 0))
        self.skipped = [(*one,) for one in skipped]
        self.bad, self._open_bad = [(*one,) for one in state_dict.get("bad_samples", ())], []
        self.left_out, self._open, self._plans = list(state_dict["left_out"]), [], {}
