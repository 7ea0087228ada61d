"""Makes a user's map-style DataLoader resumable, in the order of its samplers on this rank."""

import copy
import logging
from functools import partial
from typing import Any, Literal

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from midstride.engine.data.batch_sampler_order import BatchSamplerOrder
from midstride.engine.data.limits import no_batch_left
from midstride.engine.data.map_style import MapLoader
from midstride.engine.data.order import BatchOrder, InOrder, SampleOrder, Shuffled, StridedOrder
from midstride.engine.data.rng.per_sample import Rng
from midstride.engine.data.sampler_order import SamplerOrder
from midstride.engine.data.torch_internals import has_num_samples
from midstride.engine.errors import UserError
from midstride.engine.seeds import mix
from midstride.engine.world import World

__all__ = ["evaluation_loader", "training_loader", "without_shuffle"]

log = logging.getLogger(__name__)
_STAGES = ("validate", "test", "predict")


def training_loader(
    loader: DataLoader[Any], world: World, *, seed: int, shard: bool, limit: float, rng: Rng = "lazy"
) -> MapLoader:
    """Return `loader` as a resumable one, in DistributedSampler's order.

    `shard` gives every rank its own samples.

    Raises:
        NotExact: the loader's data set or sampler cannot be resumed exactly.
        UserError: there is no batch to train on.
    """
    _check(loader, "train")
    key = mix(seed, 0)
    order = _order(loader, world, what="train", key=key, seed=seed, shard=shard, rest="padded", limit=limit)
    exact = MapLoader(loader, order, key, limit, rng=rng, what="train")
    if exact.estimated_batches == 0:
        rank_samples = order.rank_samples() if isinstance(order, StridedOrder) else 0
        reason = (
            f"batch_size {order.batch_size} is larger than a rank's {rank_samples} of {len(order.sequence)} samples, "
            "and drop_last=True drops incomplete batches: use a smaller batch or drop_last=False"
            if len(order) == 0
            else no_batch_left("limit_train_batches", limit, len(order))
        )
        raise UserError(f"the training loader has no batch: {reason}.")
    return exact


def without_shuffle(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a copy of `loader` that reads the data set in order.

    Raises:
        UserError: a batch sampler of the user's own chooses the samples.
    """
    batches: Any = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        raise UserError(
            f"overfit_batches reads the training data in order, and {type(batches).__name__} chooses the samples: "
            "pass a loader with batch_size, or set limit_train_batches"
        )
    dataset: Any = loader.dataset
    sampler, ordered = SequentialSampler(dataset), copy.copy(loader)
    chosen = sampler if batches is None else BatchSampler(sampler, batches.batch_size, batches.drop_last)
    vars(ordered).update({"sampler": sampler} if batches is None else {"sampler": sampler, "batch_sampler": chosen})
    return ordered


def evaluation_loader(
    loader: DataLoader[Any],
    world: World,
    *,
    seed: int,
    stage: str,
    number: int,
    shard: bool,
    limit: float,
    rng: Rng,
) -> MapLoader:
    """Return loader `number` of `stage` as a resumable one that reads each sample once.

    Over all ranks.

    Raises:
        NotExact: the loader's data set or sampler cannot be resumed exactly.
    """
    _check(loader, stage)
    key = mix(mix(seed, 1 + _STAGES.index(stage)), number)
    order = _order(loader, world, what=stage, key=key, seed=seed, shard=shard, rest="kept", limit=limit)
    return MapLoader(loader, order, key, limit, rng=rng, what=stage)


def _check(loader: DataLoader[Any], what: str) -> None:
    dataset: Any = loader.dataset
    if hasattr(dataset, "__len__") and len(dataset) == 0:
        raise UserError(f"the {what} data set {type(dataset).__name__} has length 0: there is nothing to read.")


def _order(
    loader: DataLoader[Any],
    world: World,
    *,
    what: str,
    key: int,
    seed: int,
    shard: bool,
    rest: Literal["padded", "kept"],
    limit: float,
) -> BatchOrder:
    """Return the order of batches that the samplers of `loader` define on this rank."""
    batches: Any = loader.batch_sampler
    own = world.size > 1 and (not shard or _shards_itself(loader, world, what))
    # batches that the readers of the sampler take in an epoch at most
    most = limit * (1 if own else world.size) if isinstance(limit, int) and limit else None
    if batches is not None and type(batches) is not BatchSampler:
        sampled = SamplerOrder(batches, loader, key, what, shared=not own, most=most)
        return BatchSamplerOrder(sampled, rank=world.rank, size=world.size, rest=rest, own=own)
    # For a torch BatchSampler that the user has built, the loader itself has neither sampler nor batch size.
    sampler, batch_size, drop_last = (
        (loader.sampler, 1, False) if batches is None else (batches.sampler, batches.batch_size, batches.drop_last)
    )
    tail: Literal["padded", "dropped", "kept"] = rest
    if type(sampler) is DistributedSampler and shard:
        own = False
        tail = "dropped" if sampler.drop_last and rest == "padded" else rest
    training, most = rest != "kept", None if most is None else most * batch_size
    if type(sampler) is DistributedSampler and sampler.num_replicas != world.size:
        sequence: SampleOrder = SamplerOrder(sampler, loader, key, what, shared=False, most=most)
    else:
        sequence = _sample_order(sampler, loader, what=what, key=key, seed=seed, training=training, own=own, most=most)
    return StridedOrder(sequence, batch_size, drop_last, world.rank, world.size, tail, own)


def _sample_order(
    sampler: Any,
    loader: DataLoader[Any],
    *,
    what: str,
    key: int,
    seed: int,
    training: bool,
    own: bool,
    most: int | None,
) -> SampleOrder:
    if type(sampler) is SequentialSampler:
        return InOrder(len(sampler), partial(len, sampler))
    if type(sampler) is DistributedSampler and not own:
        dataset: Any = sampler.dataset
        samples = len(dataset)
        if sampler.shuffle and training:
            return Shuffled(samples, sampler.seed, "DistributedSampler", partial(len, dataset))
        return InOrder(samples, partial(len, dataset))
    plain = (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and not has_num_samples(sampler)
        and sampler.generator is None
    )
    if plain and training:
        return Shuffled(len(sampler), seed, now=partial(len, sampler))
    if plain:
        log.warning("the %s loader has shuffle=True, which is ignored: each sample is read once, in order", what)
        return InOrder(len(sampler), partial(len, sampler))
    return SamplerOrder(sampler, loader, key, what, shared=not own, most=most)


def _shards_itself(loader: DataLoader[Any], world: World, what: str) -> bool:
    """Return whether a sampler of `loader` shards the samples itself.

    Raises:
        UserError: it does so for another rank or world size.
    """
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while sampler is not None:
        shard = getattr(sampler, "rank", None), getattr(sampler, "num_replicas", None)
        if None not in shard:
            if shard != (world.rank, world.size):
                raise UserError(
                    f"the {what} loader's {type(sampler).__name__} is for rank {shard[0]} of {shard[1]}, this is rank "
                    f"{world.rank} of {world.size}. Leave rank= and num_replicas= out, or pass these."
                )
            return True
        sampler = getattr(sampler, "sampler", None)
    return False
