"""Finds the user's training, validation, test and prediction loaders for a resume."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from midstride.engine.config.options import TrainerOptions
from midstride.engine.data.combined import (
    CombinedLoader,
    CombinedResumableLoader,
    Mode,
    convert_combined,
    named_loaders,
)
from midstride.engine.data.dataloader_order import evaluation_loader, training_loader, without_shuffle
from midstride.engine.data.iterable.loader import IterableLoader
from midstride.engine.data.lane_loader import LaneLoader, check_lanes, nest_in_lanes
from midstride.engine.data.limits import no_batch_left
from midstride.engine.data.loader import ResumableLoader
from midstride.engine.data.map_style import MapLoader
from midstride.engine.data.whole_loader import Batches, WholeLoader, is_loader, is_read_whole
from midstride.engine.errors import NotExact, UserError
from midstride.engine.lanes import Lanes
from midstride.engine.seeds import mix
from midstride.engine.user_code import call_user_code
from midstride.engine.world import World

__all__ = [
    "LOADER_METHODS",
    "LoaderResolver",
    "LoaderSettings",
    "RankAgreement",
    "loaders_of",
    "training_reader",
    "training_readers",
]

#: stage of an evaluation -> the method that returns its loaders
LOADER_METHODS = {"validate": "val_dataloader", "test": "test_dataloader", "predict": "predict_dataloader"}
_STAGES = tuple(LOADER_METHODS)


class RankAgreement(Protocol):
    """Collectives to compare loaders of ranks; all ranks call each at the same point."""

    def gather(self, value: object) -> list[Any]:
        """Return every rank's `value`, in the order of ranks."""
        ...

    def all_agree(self, value: bool) -> bool:
        """Return whether `value` is true on every rank."""
        ...


@dataclass(frozen=True)
class LoaderSettings:
    """Settings for reading loaders.

    Args:
        world: the ranks that share the samples; with lanes, a rank stands for a lane.
        options: options with limits, sharding and random numbers.
        seed: seed of the run.
        lanes: lanes that share the samples; None without lanes.
        global_batch_size: samples in a training batch over all ranks; None uses the loader's batch size.
    """

    world: World
    options: TrainerOptions
    seed: int
    lanes: Lanes | None = None
    global_batch_size: int | None = None

    @property
    def shard(self) -> bool:
        """Whether each rank reads its own share of the samples."""
        return self.options.use_distributed_sampler and self.world.size > 1


class LoaderResolver:
    """Returns the loaders of each stage: the given ones, the DataModule's or the module's.

    Args:
        settings: how loaders are read.
        ranks: collectives to compare the loaders of all ranks.
        module: module, whose methods return loaders that are not given.
        train: DataModule or training loaders, or None.
        evaluate: DataModule or evaluation loaders, or None.

    Raises:
        UserError: validation loaders were given of another type.
    """

    def __init__(
        self, settings: LoaderSettings, ranks: RankAgreement, module: Any, *, train: Any = None, evaluate: Any = None
    ) -> None:
        self._settings, self._options, self._ranks = settings, settings.options, ranks
        self._module = module
        train, evaluate = loaders_of(train), loaders_of(evaluate)
        self._train_on, self._evaluate_on = (given if _is_loader(given) else None for given in (train, evaluate))
        #: object that the training loader comes from
        self.source = module if train is None else train
        #: stage ("train", "validate" and so on) -> the user's loaders
        self.given: dict[str, Any] = {}
        self._made: list[ResumableLoader] = []
        self._owner = next((one for one in (train, evaluate) if one is not None and not _is_loader(one)), module)
        if train is not None and evaluate is not None and self._evaluate_on is None:
            raise UserError(
                f"val_dataloaders is a {type(evaluate).__name__}; a DataLoader, or a list or dict of them, is needed."
            )

    def training(self) -> ResumableLoader:
        """Return the training loader.

        Raises:
            UserError: there is none, it has no batch, or the ranks have different loaders.
        """
        given = self._call("train_dataloader") if self._train_on is None else self._train_on
        if given is None:
            raise UserError(self._no_loader())
        self.given["train"] = given
        limit = self._options.limit_train_batches
        in_lanes = self._settings.lanes is not None
        resumable = training_readers(given, "the training loader", limit, self._train, in_lanes=in_lanes)
        if self._settings.global_batch_size is not None:
            _share_batches(resumable, self._settings.global_batch_size, self._settings)
        if resumable.estimated_batches == 0 and limit != 1.0:
            reason = no_batch_left("limit_train_batches", limit, resumable.unlimited_batches)
            raise UserError(f"there is no batch to train on: {reason}.")
        mine = len(resumable) if resumable.is_sized else None, resumable.order_identity()
        counts, identities = zip(*self._ranks.gather(mine), strict=True)
        if len(set(counts)) > 1:
            raise UserError(
                f"the ranks have {[*counts]} training batches: all need the same number, or they would hang. Let the "
                f"Trainer divide the samples, or pad them."
            )
        if self._settings.shard:
            _check_alike(identities)
        self._made.append(resumable)
        return resumable

    def _no_loader(self) -> str:
        kind, owner = type(self._owner).__name__, self._owner
        if isinstance(owner, Dataset):
            return f"fit was given a {kind}, a data set, to train on: put it into a DataLoader"
        if callable(getattr(owner, "train_dataloader", None)):
            return f"there is no training loader: write {kind}.train_dataloader, and return one."
        if owner is self._module:
            return f"there is no training loader: call fit(module, DataLoader(...)), or write {kind}.train_dataloader"
        needed = "a DataLoader, a list or dict of them, or an object with train_dataloader"
        return f"fit was given a {kind} to train on; {needed}, is needed."

    def _train(self, loader: Any, name: str, number: int, limit: float) -> ResumableLoader:
        """Return training loader `number`; the first uses the run's seed, others derived ones."""
        settings = self._settings
        seed = mix(settings.seed, number) % (1 << 32) if number else settings.seed
        self._check_lanes(loader, name)
        reader = training_reader(loader, name, settings, seed=seed, limit=limit, agree=self._ranks.all_agree)
        left_out, skips_bad = self._options.skip_samples, self._options.bad_samples is not None
        if isinstance(reader, IterableLoader):
            if left_out or skips_bad:
                what = "skip_samples" if left_out else "bad_samples"
                raise UserError(f"{what}: samples of {name} have no index. Leave them out in the data set")
            if isinstance(self._module, nn.Module):
                reader.attach(self._module)
            return reader
        resumable = self._resumable(reader)
        resumable.check_data()
        if skips_bad:
            resumable.skip_bad_samples()
        if left_out:
            resumable.leave_out(left_out)
        return resumable

    def _check_lanes(self, loader: Any, name: str) -> None:
        if self._settings.lanes is None or not is_loader(loader):
            return
        if is_read_whole(loader):
            raise NotExact(
                f"{name} with lanes: a {type(loader).__name__} is read as a whole, and cannot be divided into lanes: "
                "return a DataLoader, or leave lanes out."
            )
        if isinstance(loader, DataLoader):
            check_lanes(loader, name, shard=self._options.use_distributed_sampler)

    def _resumable(self, loader: MapLoader) -> MapLoader:
        lanes = self._settings.lanes
        resumable = loader if lanes is None else LaneLoader.of(loader, lanes)
        if isinstance(self._module, nn.Module):
            resumable.attach(self._module)
        return resumable

    def evaluation(self, stage: str) -> list[ResumableLoader]:
        """Return the loaders of `stage` by `dataloader_idx`; [] if there are none.

        Raises:
            UserError: the ranks have different numbers of loaders, or the limit leaves no batch.
        """
        given = self._call(LOADER_METHODS[stage]) if self._evaluate_on is None else self._evaluate_on
        self.given[stage] = given
        option, limit = self._limit(stage)
        resumables = [] if given is None or given == [] else self._evaluation(given, stage, limit)
        counts = self._ranks.gather(len(resumables))
        if len({*counts}) > 1:
            raise UserError(
                f"the ranks have {counts} {stage} loaders: all need the same number. Return the same "
                f"loaders on all ranks."
            )
        self._made += resumables
        if 0.0 < limit < 1.0:
            self._check_limit(resumables, stage, option, limit)
        return resumables

    def _limit(self, stage: str) -> tuple[str, float]:
        """Return the option that limits batches of `stage`, and its value."""
        options = self._options
        limits = {
            "validate": options.limit_val_batches,
            "test": options.limit_test_batches,
            "predict": options.limit_predict_batches,
        }
        return f"limit_{'val' if stage == 'validate' else stage}_batches", limits[stage]

    def _check_limit(self, resumables: Sequence[ResumableLoader], stage: str, option: str, limit: float) -> None:
        """Check that a share of the batches is at least one batch on some rank."""
        counts = [(loader.unlimited_batches, loader.estimated_batches) for loader in resumables]
        for number, ranks in enumerate(zip(*self._ranks.gather(counts), strict=True)):
            whole = max(batches or 0 for batches, _ in ranks)
            if whole and all(left == 0 for _, left in ranks):
                which = f"{stage} loader {number}" if len(resumables) > 1 else f"the {stage} loader"
                raise UserError(f"{which} has no batch: {no_batch_left(option, limit, whole)}.")

    def close(self) -> None:
        """Close all loaders; else persistent workers would live as long as references to the data."""
        for loader in self._made:
            loader.close()

    def _evaluation(self, given: Any, stage: str, limit: float) -> list[ResumableLoader]:
        mode: Mode = given.mode if isinstance(given, CombinedLoader) else "sequential"
        if mode != "sequential" and self._settings.lanes is not None:
            raise NotExact(
                f"mode {mode} reads the {stage} loaders side by side, but lanes have different numbers of batches in "
                "an evaluation: set mode='sequential'."
            )
        loaders = given.loaders if isinstance(given, CombinedLoader) else given
        named, nest = named_loaders(loaders, f"the {stage} loader")
        evaluate = partial(self._evaluate, stage=stage, limit=limit if mode == "sequential" else 1.0)
        resumables = [evaluate(loader, name, i) for i, (name, loader) in enumerate(named)]
        if mode == "sequential":
            return resumables
        return [CombinedResumableLoader(f"the {stage} loaders", resumables, nest, mode, limit)]

    def _evaluate(self, loader: Any, name: str, number: int, *, stage: str, limit: float) -> ResumableLoader:
        settings, rng = self._settings, self._options.rng
        self._check_lanes(loader, name)
        if (kind := _iterable_kind(loader)) is not None:
            key = mix(mix(mix(settings.seed, 1 + _STAGES.index(stage)), number), settings.world.rank)
            return kind(loader, name=name, key=key, limit=limit, check_repeatability=rng == "lazy")
        exact = evaluation_loader(
            loader,
            settings.world,
            seed=settings.seed,
            stage=stage,
            number=number,
            shard=settings.shard,
            limit=limit,
            rng=rng,
        )
        return self._resumable(exact)

    def _call(self, name: str) -> Any:
        if isinstance(self._owner, type):
            raise UserError(
                f"the data are the class {self._owner.__name__}: give an instance, {self._owner.__name__}()"
            )
        method = getattr(self._owner, name, None)
        return None if method is None else loaders_of(call_user_code(f"{type(self._owner).__name__}.{name}", method))


def training_reader(
    loader: Any,
    name: str,
    settings: LoaderSettings,
    *,
    seed: int,
    limit: float = 1.0,
    agree: Callable[[bool], bool] | None = None,
) -> MapLoader | IterableLoader:
    """Return a training loader of any kind as a resumable one.

    Args:
        loader: the loader.
        name: name of the loader in messages.
        settings: how loaders are read.
        seed: seed of this loader.
        limit: share of the batches, or number of batches.
        agree: as for `IterableLoader`.

    Raises:
        UserError: it is no loader, or has no batch.
        NotExact: its data set or sampler cannot be resumed exactly.
    """
    if not is_loader(loader):
        raise UserError(f"{name} is a {type(loader).__name__}; a torch.utils.data.DataLoader is needed.")
    rng = settings.options.rng
    if (kind := _iterable_kind(loader)) is None:
        if settings.options.overfit_batches:
            loader = without_shuffle(loader)
        return training_loader(loader, settings.world, seed=seed, shard=settings.shard, limit=limit, rng=rng)
    key = mix(mix(seed, 0), settings.world.rank)
    reader = kind(loader, name=name, key=key, limit=limit, check_repeatability=rng == "lazy", agree=agree)
    if settings.shard:
        reader.compare_ranks()
    return reader


def training_readers(
    given: Any, name: str, limit: float, read: Callable[[Any, str, int, float], ResumableLoader], *, in_lanes: bool
) -> ResumableLoader:
    """Return one resumable loader for a loader, or for several that are read at once.

    Args:
        given: a loader, a `CombinedLoader`, or a nest of loaders.
        name: name in messages.
        limit: share of the batches, or number of batches.
        read: returns the resumable loader of a loader, its name, its number, and its limit.
        in_lanes: whether each batch is one batch for each lane.
    """
    if isinstance(given, (dict, list, tuple)):
        given = CombinedLoader(given, "max_size_cycle")
    if not isinstance(given, CombinedLoader):
        return read(given, name, 0, limit)
    named, nest = named_loaders(given.loaders, name)
    readers = [read(loader, path, i, 1.0) for i, (path, loader) in enumerate(named)]
    nest = nest_in_lanes(nest) if in_lanes and given.mode != "sequential" else nest
    return CombinedResumableLoader(f"{name}s", readers, nest, given.mode, limit)


def loaders_of(given: Any) -> Any:
    """Return `given`; converted if it is a CombinedLoader of Lightning's, or a list of batches."""
    if type(given) is list and given and not _is_loader(given):
        return Batches(given)
    return convert_combined(given)


def _is_loader(source: Any) -> bool:
    """Return whether `source` is a loader or a nest of them, not an object that returns them."""
    if isinstance(source, (dict, list, tuple)):
        return any(_is_loader(inner) for inner in (source.values() if isinstance(source, dict) else source))
    return isinstance(source, CombinedLoader) or is_loader(source)


def _iterable_kind(loader: Any) -> type[IterableLoader] | None:
    """Return the class that reads `loader`, if its batches have no order that is known."""
    if is_read_whole(loader):
        return WholeLoader
    return IterableLoader if isinstance(loader.dataset, IterableDataset) else None


def _check_alike(identities: tuple[dict[str, Any], ...]) -> None:
    """Check that all ranks have the same order of samples, which they share."""
    for rank, other in enumerate(identities):
        for name, value in other.items():
            if value != identities[0][name]:
                raise UserError(
                    f"the ranks share the training samples, but differ in {name}: rank 0 has {identities[0][name]!r}, "
                    f"rank {rank} has {value!r}. Build the same data set and sampler on every rank, or set "
                    "use_distributed_sampler=False."
                )


def _share_batches(loader: ResumableLoader, batch: int, settings: LoaderSettings) -> None:
    """Set the batch size of each rank such that all ranks together read `batch` samples.

    Raises:
        NotExact: the loader does not support that, or the ranks cannot share such batches.
    """
    ranks, why = settings.world.size, loader.fixed_world
    if settings.lanes is not None:
        raise NotExact(
            f"global_batch_size {batch} with lanes, each of which has the loader's batch_size: leave one out"
        )
    if why is None and loader.batch_size is None:
        why = "its batches have no fixed size"
    if why is not None:
        raise NotExact(f"global_batch_size {batch}: the training loader's batches cannot be set: {why}. Leave it out.")
    if ranks not in (worlds := loader.valid_world_sizes(1, batch)):
        raise NotExact(
            f"global_batch_size {batch}: {ranks} ranks cannot share such batches without changing the epoch. Start "
            f"one of these numbers of ranks: {', '.join(map(str, worlds))}."
        )
    loader.resize(batch // ranks)
