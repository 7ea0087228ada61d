"""The collate_fn of a stream: each batch with random numbers of its own; in a worker, looked at with some of them."""

from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate, default_convert

from midstride.engine.data.read_memory import ReadMemory
from midstride.engine.data.rng.fast_state import seed_generators
from midstride.engine.data.rng.owned_generators import OwnedGenerators
from midstride.engine.data.rng.repeatability import collate_name, copied, ensure_same_batch, is_repeatable
from midstride.engine.errors import NotExact
from midstride.engine.seeds import mix

__all__ = ["Collation"]

_IN_ITER = "Do that in __iter__ of the data set."
_REMEMBERS = (
    "{name} gave another batch than where it was given nothing before: it remembers what it was given ({what}), in "
    "each worker for itself, and no snapshot holds that. A resumed run, and each worker, would begin without it. "
) + _IN_ITER


class Collation:
    """Makes batches of the samples of shards.

    Args:
        function: the user's.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        # Torch's own draw nothing, and seeding costs as much as they do on small batches.
        self._draws = function not in (default_collate, default_convert)
        self._generators = OwnedGenerators()
        self._memory: ReadMemory | None = None  #: in a worker, what the function holds
        self._is_tried = False

    def generators(self) -> list[Any]:
        """Return the generators that the function holds or names, as far as their states can be put back."""
        return self._generators.generators_of(self.function) if self._draws else []

    def batch(self, samples: Any, seed: int, *, in_worker: bool) -> Any:
        """Return the batch of `samples`, drawn from `seed`.

        Raises:
            NotExact: in a worker, which is made anew where a run resumes: the function remembers its calls.
        """
        given = copied(samples) if in_worker and self._is_due() else None
        self._seed(seed)
        batch = self.function(samples)
        if given is not None:
            self._check(batch, given, seed)
        return batch

    def _is_due(self) -> bool:
        """Return whether the next batch is one to look at: the first, the second, the fourth, and so on."""
        if not self._draws:
            return False
        if self._memory is None:
            self._memory = ReadMemory((), self.function)
            self._memory.begin()
        return self._memory.is_due() or not self._is_tried

    def _check(self, batch: Any, samples: Any, seed: int) -> None:
        """Refuse a function that makes another batch of `samples` when it has seen others, or these, before."""
        if not self._is_tried:
            self._is_tried = True
            self._seed(seed)
            ensure_same_batch(self.function, batch, self.function(samples), way_out=_IN_ITER)
        elif self._memory is not None and (what := self._memory.changed()) is not None:
            with self._memory.reverted():
                self._memory.forget()
                self._seed(seed)
                again = self.function(samples)
            if not is_repeatable(batch, again):
                raise NotExact(_REMEMBERS.format(name=collate_name(self.function), what=what))

    def _seed(self, seed: int) -> None:
        if not self._draws:
            return
        seed_generators(seed)
        for number, set_seed in enumerate(self._generators.of(self.function)):
            set_seed(mix(seed, number))
