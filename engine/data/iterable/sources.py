"""Resume of an iterable data set: by its state, by its sampler, or by reading again.

data set has                            resumes from                      reads again
state_dict and load_state_dict          that state                        nothing
a sampler, and __next__                 the number of indices taken       nothing
neither                                 its start                         everything before the position
"""

from collections.abc import Iterator
from itertools import count, islice, repeat
from typing import Any, Protocol

from torch.utils.data import Sampler

from midstride.engine.data.rng.fast_state import seed_generators
from midstride.engine.data.rng.isolation import RngIsolation
from midstride.engine.errors import NotExact
from midstride.engine.seeds import mix
from midstride.engine.state.codec import encode
from midstride.engine.state.stateful import Stateful

__all__ = ["Source", "replay_source", "source_of"]


class Source(Protocol):
    """An iterator over the samples of a data set, with a state to resume from."""

    iterator: Iterator[Any]

    def state(self, samples: int) -> Any:
        """Return the state after `samples` samples; None if a resume has to read them again."""


def source_of(dataset: Any, epoch: int, key: int, state: Any) -> Source:
    """Return a source of the samples of `dataset` in `epoch`, from `state` on if it is not None.

    Args:
        dataset: iterable data set, which is modified.
        epoch: epoch, for `set_epoch` of the data set or its sampler.
        key: hash that seeds the sampler.
        state: result of `Source.state`, or None.
    """
    _set_epoch(dataset, epoch)
    if isinstance(dataset, Stateful) and not _is_own_iterator(dataset):
        return _StatefulDataset(dataset, state)
    if _takes_indices(dataset):
        return _SampledSource(dataset, key, state)
    iterator = iter(dataset)  # pyright: ignore[reportCallIssue, reportArgumentType]  # it iterates, or its own error tells
    return _StatefulIterator(iterator, state) if isinstance(iterator, Stateful) else _ReplayedSource(iterator)


def replay_source(dataset: Any, epoch: int, key: int) -> Source:
    """Return a source of the samples of `dataset` in `epoch` from its start, without states."""
    _set_epoch(dataset, epoch)
    return _SampledSource(dataset, key, None) if _takes_indices(dataset) else _ReplayedSource(iter(dataset))


def _takes_indices(dataset: Any) -> bool:
    """Return whether the data set seems to take one index of a sampler for each sample."""
    return hasattr(dataset, "sampler") and hasattr(type(dataset), "__next__") and not isinstance(dataset, Stateful)


def _set_epoch(dataset: Any, epoch: int) -> None:
    for owner in (dataset, getattr(dataset, "sampler", None)):
        if callable(set_epoch := getattr(owner, "set_epoch", None)):
            set_epoch(epoch)


def _is_own_iterator(dataset: Any) -> bool:
    return hasattr(type(dataset), "__next__")


def _check_encoding(stateful: Any) -> None:
    """Raise the errors that writing the state to a snapshot would raise."""
    try:
        state = stateful.state_dict()
    except Exception:
        return  # some have no state before the first sample
    encode({type(stateful).__name__: state})


class _ReplayedSource:
    """An iterator without a state: a resume reads its samples again."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator

    def state(self, samples: int) -> Any:
        return None


class _StatefulIterator:
    """An iterator with a state, which is loaded after `__iter__`, since that may reset it."""

    def __init__(self, iterator: Any, state: Any) -> None:
        self.iterator = iterator
        if state is None:
            _check_encoding(iterator)
        else:
            iterator.load_state_dict(state)

    def state(self, samples: int) -> Any:
        state: Any = self.iterator.state_dict()
        return state


class _StatefulDataset:
    """A data set with a state, which is loaded before `__iter__`, which starts from it."""

    def __init__(self, dataset: Any, state: Any) -> None:
        self._dataset = dataset
        if state is not None:
            dataset.load_state_dict(state)
        self.iterator = iter(dataset)
        if state is None:
            _check_encoding(dataset)

    def state(self, samples: int) -> Any:
        return self._dataset.state_dict()


class _SampledSource:
    """Data set that takes a sampler's index per sample; its state is their number."""

    def __init__(self, dataset: Any, key: int, state: Any) -> None:
        sampler = dataset.sampler
        if isinstance(sampler, _CountedSampler):  # set by an earlier pass in this process
            sampler = sampler.sampler
        self._counted = _CountedSampler(sampler, mix(key, 1), state["indices"] if state else 0)
        dataset.sampler = self._counted
        self.iterator = iter(dataset)

    def state(self, samples: int) -> Any:
        counted = self._counted
        # Otherwise the data set takes indices ahead or skips samples, so that their number is no sufficient state.
        return {"indices": samples} if counted.taken == samples and counted.passes == 1 else None


class _CountedSampler(Sampler[Any]):
    """Wraps the user's sampler: starts at any index, counts and seeds."""

    BLOCK = 1024

    def __init__(self, sampler: Any, key: int, start: int) -> None:
        self.sampler, self.taken, self.passes = sampler, start, 0
        self._key, self._start = key, start

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return self._indices(self._start if self.passes == 1 else 0)

    def _indices(self, start: int) -> Iterator[Any]:
        before = 0
        for block in self._blocks():
            for index in block[max(0, start - before) :]:
                self.taken += 1
                yield index
            before += len(block)
        if before < start:
            raise NotExact(
                f"the sampler {type(self.sampler).__name__} gave {before} indices, and the run had taken {start}: "
                "resume with the data it had, or start over under another run name."
            )

    def _blocks(self) -> Iterator[list[Any]]:
        """Yield indices in blocks, unaffected by numbers that the data set draws in between."""
        isolation = RngIsolation()
        iterator: Iterator[Any] = iter(())
        for number in count():
            with isolation:
                seed_generators(mix(self._key, number))
                if number == 0:
                    # islice would call iter() for each block, on which a sampler that is its own iterator starts over.
                    iterator = map(next, repeat(iter(self.sampler)))
                block = list(islice(iterator, self.BLOCK))
            if not block:
                return
            yield block
