"""Resumes with another number of ranks: same global batches, merged states of ranks.

The order of samples and their random numbers depend only on the position in the epoch, so a world of any size that
divides the global batch trains on the same samples. State that is the same on all ranks is given to all of them.
State of single ranks (metrics, sums of logged values, gradients of an open window) is merged on rank 0, and the other
ranks start empty, so that the next reduction over the ranks gives the same result.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from midstride.engine.data.loader import FitLoaders, ResumableLoader
from midstride.engine.errors import NotExact
from midstride.engine.state.stateful import Reshardable, Stateful
from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.mixins import FixedWorld

__all__ = [
    "InitialSharding",
    "apply_initial_sharding",
    "check_fixed_world",
    "padding_change",
    "reshard",
    "resize_loaders",
]


def reshard(parts: Mapping[str, Stateful], trees: Sequence[Mapping[str, Any]], rank: int) -> dict[str, Any]:
    """Return the tree of state of `rank` in a new world, merged from those of the old world.

    Args:
        parts: parts of the new world.
        trees: trees of the old ranks, in order; all but the first may lack parts that are not `Reshardable`.
        rank: rank in the new world.

    Raises:
        NotExact: the states of a part cannot be merged.
    """
    return {
        name: part.resharded([tree[name] for tree in trees], rank) if isinstance(part, Reshardable) else trees[0][name]
        for name, part in parts.items()
        if name in trees[0]  # `restore_parts` reports missing ones
    }


@dataclass(frozen=True)
class InitialSharding:
    """World size and batch sizes at the start of a run, from which global batch sizes follow.

    Args:
        size: number of ranks.
        batch_size: batch size of the training loader on each rank; None if it is not fixed.
        validation: batch size of each validation loader on each rank.
    """

    size: int
    batch_size: int | None
    validation: tuple[int | None, ...]

    @classmethod
    def of(cls, loaders: FitLoaders, size: int) -> "InitialSharding":
        """Return the sharding of `loaders` on `size` ranks."""
        return cls(size, loaders.training.batch_size, tuple(loader.batch_size for loader in loaders.validation))

    def to_json(self) -> dict[str, Any]:
        """Return a dict of JSON values."""
        return {"size": self.size, "batch_size": self.batch_size, "validation": list(self.validation)}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> "InitialSharding":
        """Return the sharding from the result of `to_json`."""
        return cls(facts["size"], facts["batch_size"], tuple(facts["validation"]))


def check_fixed_world(strategy: Strategy, was: int, size: int, where: str) -> None:
    """Check that the strategy can resume with another number of ranks.

    Raises:
        NotExact: it cannot; the message says why.
    """
    if isinstance(strategy, FixedWorld) and (why := strategy.fixed_world) is not None:
        raise NotExact(
            f"{where} was taken by {was} processes, now there are {size}, and strategy {strategy.name} continues with "
            f"{was} only: {why}. Start it with {was}, or start over under another run name."
        )


def resize_loaders(
    loaders: FitLoaders, start: InitialSharding, *, was: int, size: int, validating: bool, where: str
) -> None:
    """Divide the global batches of a run that started as `start` by `size` ranks.

    Raises:
        NotExact: the batches of a loader cannot be divided by `size` ranks.
    """
    training = loaders.training
    _resize(training, "training", start.size, start.batch_size, was=was, size=size, where=where)
    for number, (loader, batch_size) in enumerate(zip(loaders.validation, start.validation, strict=False)):
        name = f"validation {number}"
        if validating:
            _resize(loader, name, start.size, batch_size, was=was, size=size, where=where)
            _check_same_batches(loader, name, start.size, batch_size, size, where)
        # Outside of a validation its batch size may change: every sample is read once all the same.
        elif batch_size and loader.fixed_world is None and size in loader.valid_world_sizes(start.size, batch_size):
            _resize(loader, name, start.size, batch_size, was=was, size=size, where=where)


def _check_same_batches(
    loader: ResumableLoader, name: str, began: int, batch_size: int | None, size: int, where: str
) -> None:
    now = loader.batch_size
    if batch_size is not None and now is not None and now * size != batch_size * began:
        raise NotExact(
            f"{where} stands in the middle of a validation whose {name} loader has batches of {batch_size * began} "
            f"samples, here they have {now * size}. Start it with {began} x {batch_size} = {began * batch_size} "
            "samples, or resume from a snapshot outside a validation."
        )


def _resize(
    loader: ResumableLoader, name: str, began: int, batch_size: int | None, *, was: int, size: int, where: str
) -> None:
    if was != size and loader.fixed_world is not None:
        raise NotExact(
            f"{where} was taken by {was} processes, now there are {size}, and the {name} loader can continue with "
            f"{was} only: {loader.fixed_world}. Start it with {was}, or start over under another run name."
        )
    if size == began or batch_size is None or loader.batch_size is None:
        return
    if loader.batch_size != batch_size and loader.batch_size * size != began * batch_size:
        return  # the user has changed the global batch size, which the check of the identity refuses
    worlds = loader.valid_world_sizes(began, batch_size)
    if size not in worlds:
        raise NotExact(
            f"{where} is of a run whose {name} batches have {began} x {batch_size} = {began * batch_size} samples, "
            f"which {size} processes cannot share. Start it with one of these numbers, since with others an epoch "
            f"would have other batches: {', '.join(map(str, worlds))}."
        )
    loader.resize(began * batch_size // size)


def apply_initial_sharding(loaders: FitLoaders, facts: Mapping[str, Any], size: int) -> None:
    """Divide the global batches at the start of the run with these `facts` by `size` ranks.

    Called before anything reads the number of batches. Loaders that do not allow that are left unchanged, and refused
    when the snapshot is restored.
    """
    if "start" in facts:
        start = InitialSharding.from_json(facts["start"])
        with suppress(NotExact):
            resize_loaders(loaders, start, was=size, size=size, validating=False, where="")


def padding_change(samples: int, was: int, size: int) -> str | None:
    """Return text on the different end of an epoch of `samples` on `was` and `size` ranks."""
    then, now = -samples % was, -samples % size
    if then == now:
        return None
    return (
        f"{samples} samples are no multiple of the ranks: {was} ranks padded the last batch of an epoch with {then} "
        f"samples from its start, {size} pad it with {now}. From that batch on the run differs"
    )
