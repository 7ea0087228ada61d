"""The collate_fn of a stream: each batch with random numbers of its own; in a worker, tried with the first of them."""

from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate, default_convert

from midstride.engine.data.rng.fast_state import seed_generators
from midstride.engine.data.rng.owned_generators import OwnedGenerators
from midstride.engine.data.rng.repeatability import copied, ensure_same_batch
from midstride.engine.seeds import mix

__all__ = ["Collation"]


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
        self._is_tried = not self._draws

    def generators(self) -> list[Any]:
        """Return the generators that the function holds or names, as far as their states can be put back."""
        return self._generators.generators_of(self.function) if self._draws else []

    def batch(self, samples: Any, seed: int, *, in_worker: bool) -> Any:
        """Return the batch of `samples`, drawn from `seed`.

        Raises:
            NotExact: in a worker, which is made anew where a run resumes: the function remembers its calls.
        """
        given = copied(samples) if in_worker and not self._is_tried else None
        self._is_tried = True
        self._seed(seed)
        batch = self.function(samples)
        if given is not None:
            self._seed(seed)
            again = self.function(given)
            ensure_same_batch(self.function, batch, again, way_out="Do that in __iter__ of the data set.")
        return batch

    def _seed(self, seed: int) -> None:
        if not self._draws:
            return
        seed_generators(seed)
        for number, set_seed in enumerate(self._generators.of(self.function)):
            set_seed(mix(seed, number))
