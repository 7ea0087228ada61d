"""A fit's loaders: the user's, each made exact."""

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from midstride.engine.data.loader import ExactLoader, evaluation_loader, training_loader
from midstride.engine.errors import NotExact, UserError
from midstride.engine.hooks import calling

if TYPE_CHECKING:
    from midstride.engine.trainer import Trainer

__all__ = ["Loaders"]

_METHODS = {"validate": "val_dataloader", "test": "test_dataloader", "predict": "predict_dataloader"}


class Loaders:
    """The loaders of a DataModule, of a module that has them itself, or one training DataLoader.

    Args:
        trainer: whose world and options decide who reads what.
        source: where the loaders come from.
    """

    def __init__(self, trainer: "Trainer", source: Any) -> None:
        self._trainer, self.source = trainer, source

    def training(self) -> ExactLoader:
        """Return the training loader."""
        given = self.source if isinstance(self.source, DataLoader) else self._call("train_dataloader")
        if given is None:
            raise UserError(f"there is no training loader: write {type(self.source).__name__}.train_dataloader.")
        if isinstance(given, (dict, list, tuple)):
            raise NotExact(
                f"train_dataloader returned a {type(given).__name__} of loaders: several at once cannot be resumed "
                "exactly. Return one DataLoader over a data set that holds them all."
            )
        trainer = self._trainer
        options = trainer.options
        shard = options.use_distributed_sampler and trainer.world.size > 1
        limit = options.limit_train_batches
        loader = training_loader(given, trainer.world, seed=trainer.seed, shard=shard, limit=limit)
        counts = trainer.strategy.gather(len(loader))
        if len(set(counts)) > 1:
            raise UserError(f"the ranks have {counts} training batches: all need the same number, or they would hang.")
        return loader

    def evaluation(self, stage: str) -> list[ExactLoader]:
        """Return the loaders of `stage`; none if there are none."""
        given = self._call(_METHODS[stage])
        trainer = self._trainer
        limit = getattr(trainer.options, f"limit_{'val' if stage == 'validate' else 'test'}_batches")
        shard = trainer.options.use_distributed_sampler and trainer.world.size > 1
        loaders = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
        exact = [
            evaluation_loader(
                loader, trainer.world, seed=trainer.seed, stage=stage, number=number, shard=shard, limit=limit
            )
            for number, loader in enumerate(loaders)
        ]
        counts = trainer.strategy.gather([len(loader) for loader in exact])
        if len({len(rank) for rank in counts}) > 1:
            raise UserError(
                f"the ranks have {[len(rank) for rank in counts]} {stage} loaders: all need the same number."
            )
        for loader, ranks in zip(exact, zip(*counts, strict=True), strict=True):
            loader.longest = max(ranks)
        return exact

    def _call(self, name: str) -> Any:
        method = getattr(self.source, name, None)
        return None if method is None else calling(f"{type(self.source).__name__}.{name}", method)
