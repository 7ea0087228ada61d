"""The loaders of a loop, which count passes and batches and can start at any of them."""

import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import count
from typing import Any

from midstride.engine.data.accelerate_internals import accelerate_pass
from midstride.engine.data.loader import FitLoaders, ResumableLoader
from midstride.engine.data.map_style import MapLoader
from midstride.engine.data.resolve import LoaderSettings, loaders_of, training_reader, training_readers
from midstride.engine.seeds import mix
from midstride.engine.strategies.collective import Collective

__all__ = ["Feed", "LoopFeeds", "LoopLoader", "StepNumbers", "reader_of"]


def reader_of(given: Any, number: int, settings: LoaderSettings, collective: Collective) -> ResumableLoader:
    """Return loader `number` of a loop as a resumable one with its own seed.

    Raises:
        UserError: it is no loader, or has no batch.
        NotExact: its data set or sampler cannot be resumed exactly.
    """
    seed = mix(settings.seed, number) % (1 << 32) if number else settings.seed
    agree = collective.all_agree if settings.world.size > 1 else None

    def read(loader: Any, name: str, inner: int, limit: float) -> ResumableLoader:
        own = mix(mix(seed, number), inner) % (1 << 32) if inner else seed
        reader = training_reader(loader, name, settings, seed=own, limit=limit, agree=agree)
        if isinstance(reader, MapLoader):
            reader.check_data()
        return reader

    return training_readers(loaders_of(given), f"loader {number}", 1.0, read, in_lanes=False)


class StepNumbers(ResumableLoader):
    """Stands for the loader of a loop without one: yields numbers of steps for ever."""

    batch_size = None
    max_batches = sys.maxsize

    def __len__(self) -> int:
        """Return the largest number."""
        return sys.maxsize

    @property
    def estimated_batches(self) -> None:
        """None: there is no end."""
        return

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yield the numbers from `start` on."""
        return count(start)

    def order_identity(self) -> dict[str, Any]:
        """Return {}: there is no order."""
        return {}


class Feed:
    """A loader and its position: its pass, and the number of returned batches.

    Args:
        name: name of the loader in the state.
        reader: reads the batches.
    """

    def __init__(self, name: str, reader: ResumableLoader) -> None:
        self.name, self.reader = name, reader
        self.number = self.batch = 0
        #: whether the pass has returned its last batch
        self.at_end = False
        #: whether an iterator of this process is within the pass
        self.is_running = False
        #: whether the next iterator continues the pass of a snapshot
        self.continues = False
        #: whether an iterator is to continue it, which has not returned a batch yet
        self._is_claimed = False
        self._begun = False
        self._restores = 0
        self._iterator: Callable[[], Generator[Any, None, None] | None] = _none

    @property
    def iterator(self) -> Generator[Any, None, None] | None:
        """The newest iterator of the script over this loader, unless it is gone."""
        return self._iterator()

    def read_by(self, iterator: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Remember `iterator` by a weak reference and return it; it ends where the script drops it."""
        self._iterator = weakref.ref(iterator)
        return iterator

    @property
    def was_read(self) -> bool:
        """Whether a pass has begun."""
        return self._begun

    def claim(self) -> bool:
        """Return whether a new iterator continues the pass of a snapshot; no later one does."""
        claimed, self.continues = self.continues, False
        self._is_claimed = self._is_claimed or claimed
        return claimed

    def unclaim(self) -> None:
        """End the pass of a snapshot: the script dropped the iterator that would continue it."""
        if self._is_claimed:
            self._is_claimed = False
            self.end_pass()

    def begin_pass(self, *, continues: bool) -> None:
        """Continue the pass of a snapshot, or begin the next one."""
        if not continues:
            self.number, self.batch, self.at_end = self.number + self._begun, 0, False
            self.reader.set_at_end(False)
        self._begun = self.is_running = True
        self._is_claimed = False

    def batches(self) -> Iterator[Any]:
        """Yield the batches from the position on; it starts again from the position after a restore."""
        restores, batches = -1, iter(list[Any]())
        with accelerate_pass(lambda: -1) as seen:  # `accelerator.accumulate` steps on the last batch
            while not self.at_end:
                if restores != self._restores:
                    restores, batches = self._restores, self.reader.batches(self.number, self.batch)
                try:
                    batch = next(batches)
                except StopIteration:
                    self.at_end = True
                    return
                self.batch += 1
                self.at_end = self.reader.at_end
                seen.returns(is_last=self.at_end)
                yield batch

    def end_pass(self) -> None:
        """Record that no iterator is within the pass any more."""
        self.is_running = False

    def set_continues(self, continues: bool) -> None:
        """Set whether the next iterator continues the pass of a snapshot."""
        self.continues = continues

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the state of the reader."""
        return {
            "pass": self.number,
            "batch": self.batch,
            "begun": self._begun,
            "at_end": self.at_end,
            "running": self.is_running,
            "reader": self.reader.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore them; the next iterator continues an unfinished pass."""
        self.number, self.batch = state_dict["pass"], state_dict["batch"]
        self._begun, self.at_end = state_dict["begun"], state_dict["at_end"]
        self.is_running = state_dict["running"]
        self.continues = self.is_running
        self.reader.load_state_dict(state_dict["reader"])
        self.reader.set_at_end(self.at_end)
        self._restores += 1

    def clone(self) -> "Feed":
        """Return a feed that can load a state while this one is read."""
        return Feed(self.name, self.reader.clone())


def _none() -> None:
    """Return None."""


class LoopFeeds(FitLoaders):
    """All loaders of a loop as one part of a run's state."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        super().__init__(feeds[0].reader)
        self.feeds = list(feeds)

    @property
    def read_in_epoch(self) -> Sequence[ResumableLoader]:
        """Every loader: a snapshot may be in the middle of a pass of each."""
        return [feed.reader for feed in self.feeds]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every loader by name."""
        return {feed.name: feed.state_dict() for feed in self.feeds}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the state of every loader."""
        for feed in self.feeds:
            feed.load_state_dict(state_dict[feed.name])

    def restored(self) -> None:
        """Call `restored` of every reader."""
        for feed in self.feeds:
            feed.reader.restored()

    def clone(self) -> "LoopFeeds":
        """Return loaders that can load a state while these are read."""
        return LoopFeeds([feed.clone() for feed in self.feeds])


class LoopLoader:
    """Result of `Loop.loader`: yields the batches of a loader and reports each to the loop.

    Args:
        feed: position and reader.
        read: yields the batches of a pass.
        given: the script's loader.
    """

    def __init__(self, feed: Feed, read: Callable[[Feed], Generator[Any, None, None]], given: Any) -> None:
        self.feed, self._read, self._given = feed, read, given

    @property
    def batch(self) -> int:
        """The number of returned batches in the current or unfinished pass; else 0."""
        return self.feed.batch if self.feed.is_running or self.feed.continues else 0

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the script's loader, such as `dataset` or `sampler`."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._given, name)

    def __len__(self) -> int:
        """Return the batches of a pass on this rank; the claimed number if only reading tells."""
        reader = self.feed.reader
        expected = None if reader.is_sized else reader.estimated_batches
        return len(reader) if expected is None else expected

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the pass of a snapshot, or else over the next pass.

        Before the state is restored, which it is shows at the first batch.
        """
        return self.feed.read_by(self._read(self.feed))
