"""Calls a stream's collate_fn: seeds it per batch, and checks in workers that it is pure."""

from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate, default_convert

from midstride.engine.data.read_side_effects import ReadSideEffects
from midstride.engine.data.rng.fast_state import seed_generators
from midstride.engine.data.rng.owned_generators import OwnedGenerators
from midstride.engine.data.rng.repeatability import collate_name, copied, ensure_same_batch, is_repeatable
from midstride.engine.errors import NotExact
from midstride.engine.seeds import mix

__all__ = ["Collation"]

_IN_ITER = "Do that in __iter__ of the data set."
_KEEPS_STATE = (
    "{name} returned another batch than without earlier calls: it remembers samples ({what}), separately in each "
    "worker and in no snapshot. A resumed run and each new worker would start without them. "
) + _IN_ITER


class Collation:
    """Makes batches of the samples of shards.

    Args:
        function: the user's collate_fn.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        # torch's functions draw no random numbers, and seeding costs as much as they do for small batches.
        self._draws = function not in (default_collate, default_convert)
        self._generators = OwnedGenerators()
        self._side_effects: ReadSideEffects | None = None  #: in a worker, finds changes of the function's attributes
        self._is_checked = False

    def generators(self) -> list[Any]:
        """Return the generators that the function refers to, if their states can be restored."""
        return self._generators.generators_of(self.function) if self._draws else []

    def batch(self, samples: Any, seed: int, *, in_worker: bool) -> Any:
        """Return the batch of `samples`, with generators seeded by `seed`.

        Raises:
            NotExact: in a worker, whose state is lost in a resume, the function keeps state between calls.
        """
        given = copied(samples) if in_worker and self._is_due() else None
        self._seed(seed)
        batch = self.function(samples)
        if given is not None:
            self._check(batch, given, seed)
        return batch

    def _is_due(self) -> bool:
        """Return whether to check the next batch: batches 1, 2, 4, 8 and so on."""
        if not self._draws:
            return False
        if self._side_effects is None:
            self._side_effects = ReadSideEffects((), self.function)
            self._side_effects.begin()
        return self._side_effects.is_due() or not self._is_checked

    def _check(self, batch: Any, samples: Any, seed: int) -> None:
        """Check that the function makes the same batch of `samples` again, without earlier batches."""
        if not self._is_checked:
            self._is_checked = True
            self._seed(seed)
            ensure_same_batch(self.function, batch, self.function(samples), way_out=_IN_ITER)
        elif self._side_effects is not None and (what := self._side_effects.changed()) is not None:
            with self._side_effects.reverted():
                self._side_effects.reset()
                self._seed(seed)
                again = self.function(samples)
            if not is_repeatable(batch, again):
                raise NotExact(_KEEPS_STATE.format(name=collate_name(self.function), what=what))

    def _seed(self, seed: int) -> None:
        if not self._draws:
            return
        seed_generators(seed)
        for number, set_seed in enumerate(self._generators.of(self.function)):
            set_seed(mix(seed, number))
