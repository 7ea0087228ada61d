"""Another number of ranks: the same global batches, cut otherwise, and every rank's state put together anew.

The order of samples and their random numbers are functions of the position in the epoch, so a world of any size that
divides the global batch trains on the same samples. What ranks have in common is given to all of them; what each
has for itself (metrics, sums of logged values, gradients of an open window) is put together on rank 0, and the
others start from nothing, so that the next reduction over the ranks gives the same.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from midstride.engine.data.loader import FitLoaders, ResumableLoader
from midstride.engine.errors import NotExact
from midstride.engine.state.stateful import Reshardable, Stateful
from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.mixins import ModelParallel

__all__ = ["InitialSharding", "check_fixed_world", "cut_as_begun", "padding_change", "reshard", "resize_loaders"]


def reshard(parts: Mapping[str, Stateful], trees: Sequence[Mapping[str, Any]], rank: int) -> dict[str, Any]:
    """Return the tree of `rank` in a new world, given those of the old one.

    Args:
        parts: of the new world.
        trees: of the old ranks, in their order; all but the first may hold only the parts that are `Reshardable`.
        rank: in the new world.

    Raises:
        NotExact: a part cannot be put together.
    """
    return {
        name: part.resharded([tree[name] for tree in trees], rank) if isinstance(part, Reshardable) else trees[0][name]
        for name, part in parts.items()
        if name in trees[0]  # what is missing is for `restore_parts` to tell
    }


@dataclass(frozen=True)
class InitialSharding:
    """How a run was cut when it began: what the loaders' batch sizes are read against.

    Args:
        size: ranks.
        batch_size: of training, on each of them; None where batches have no fixed size.
        validation: the same of each validation loader.
    """

    size: int
    batch_size: int | None
    validation: tuple[int | None, ...]

    @classmethod
    def of(cls, loaders: FitLoaders, size: int) -> "InitialSharding":
        """Return how `loaders` are cut now."""
        return cls(size, loaders.training.batch_size, tuple(loader.batch_size for loader in loaders.validation))

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"size": self.size, "batch_size": self.batch_size, "validation": list(self.validation)}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> "InitialSharding":
        """Take back what `facts` gave."""
        return cls(facts["size"], facts["batch_size"], tuple(facts["validation"]))


def check_fixed_world(strategy: Strategy, was: int, size: int, where: str) -> None:
    """Refuse another number of ranks where the strategy cannot go on with it.

    Raises:
        NotExact: saying why.
    """
    if isinstance(strategy, ModelParallel) and (why := strategy.fixed_world) is not None:
        raise NotExact(
            f"{where} was taken by {was} processes, this world has {size}, and strategy {strategy.name} goes on with "
            f"{was} only: {why}. Start it with {was}, or start over under another run name."
        )


def resize_loaders(
    loaders: FitLoaders, start: InitialSharding, *, was: int, size: int, validating: bool, where: str
) -> None:
    """Cut the global batches of a run that began as `start` for `size` ranks; it goes on from one of `was`.

    Raises:
        NotExact: a loader cannot be cut for `size` ranks.
    """
    training = loaders.training
    _resize(training, "training", start.size, start.batch_size, was=was, size=size, where=where)
    for number, (loader, batch_size) in enumerate(zip(loaders.validation, start.validation, strict=False)):
        name = f"validation {number}"
        if validating:
            _resize(loader, name, start.size, batch_size, was=was, size=size, where=where)
            _check_same_batches(loader, name, start.size, batch_size, size, where)
        # Between validations their batches are free: every sample is read once, however they are cut.
        elif batch_size and loader.fixed_world is None and size in loader.valid_world_sizes(start.size, batch_size):
            _resize(loader, name, start.size, batch_size, was=was, size=size, where=where)


def _check_same_batches(
    loader: ResumableLoader, name: str, began: int, batch_size: int | None, size: int, where: str
) -> None:
    now = loader.batch_size
    if batch_size is not None and now is not None and now * size != batch_size * began:
        raise NotExact(
            f"{where} stands in the middle of a validation whose {name} loader has batches of {batch_size * began} "
            f"samples, here they have {now * size}: samples would be left out or read again. Start it with "
            f"{began} x {batch_size} = {began * batch_size} samples, or resume from a snapshot outside a validation."
        )


def _resize(
    loader: ResumableLoader, name: str, began: int, batch_size: int | None, *, was: int, size: int, where: str
) -> None:
    if was != size and loader.fixed_world is not None:
        raise NotExact(
            f"{where} was taken by {was} processes, this world has {size}, and the {name} loader can go on with {was} "
            f"only: {loader.fixed_world}. Start it with {was}, or start over under another run name."
        )
    if size == began or batch_size is None or loader.batch_size is None:
        return
    if loader.batch_size != batch_size and loader.batch_size * size != began * batch_size:
        return  # cut by the user, otherwise; that the global batch is another is a matter of identity
    worlds = loader.valid_world_sizes(began, batch_size)
    if size not in worlds:
        raise NotExact(
            f"{where} is of a run whose {name} batches have {began} x {batch_size} = {began * batch_size} samples; "
            f"{size} processes cannot share them: an epoch would have other batches. Start it with one of these "
            f"numbers: {', '.join(map(str, worlds))}."
        )
    loader.resize(began * batch_size // size)


def cut_as_begun(loaders: FitLoaders, facts: Mapping[str, Any], size: int) -> None:
    """Cut the global batches as the run with these facts began, before anyone asks how many an epoch has.

    What cannot be cut stays as it is, and is refused when the snapshot is loaded.
    """
    if "start" in facts:
        start = InitialSharding.from_json(facts["start"])
        with suppress(NotExact):
            resize_loaders(loaders, start, was=size, size=size, validating=False, where="")


def padding_change(samples: int, was: int, size: int) -> str | None:
    """Return text on how the end of an epoch of `samples` differs between worlds of `was` and `size` ranks."""
    then, now = -samples % was, -samples % size
    if then == now:
        return None
    return (
        f"{samples} samples are no multiple of the ranks: {was} ranks padded the last batch of an epoch with {then} "
        f"samples from its start, {size} pad it with {now}. From that batch on the run is another one"
    )
