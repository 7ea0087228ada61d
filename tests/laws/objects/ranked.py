"""What a single rank of a world holds or writes."""

from typing import Any

import torch
from laws.objects.loaders import OfModule
from laws.objects.small import Rows, Small
from torch import Tensor, nn
from torch.utils.data import DataLoader

__all__ = ["RANKED"]


class Told(Small):
    """Each rank tells its data, and keeps a count, in its own way."""

    workers = 0

    def build(self) -> None:
        self.loader = DataLoader(Rows(), 4, shuffle=True, num_workers=self.workers)
        self.seen = [0.0]
        self.register_buffer("told", torch.zeros(2))

    def train_dataloader(self) -> Any:
        return self.loader

    def factor(self, batch: Tensor) -> Any:
        rank = self.trainer.global_rank
        rows: Any = self.loader.dataset
        rows.scale *= 1 + rank / 10
        self.seen += [float(batch.detach().sum())] * rank
        told: Any = self.told
        told += rank
        return 1 + sum(self.seen) / 100 + float(told.sum())


class LastRankTold(Told):
    """The last rank alone does, and workers read."""

    workers = 1

    def factor(self, batch: Tensor) -> Any:
        return super().factor(batch) if self.trainer.global_rank == self.trainer.world_size - 1 else 1.0


class OneReadsTheModule(Small):
    """The data of one rank alone hold the module."""

    def train_dataloader(self) -> Any:
        data = OfModule(self) if self.trainer.global_rank == 0 else Rows()
        return DataLoader(data, 4, num_workers=1)


class CountsInWeight(Small):
    """Counts in a parameter that is not trained."""

    def build(self) -> None:
        self.count = nn.Parameter(torch.zeros(3), requires_grad=False)

    def factor(self, batch: Tensor) -> Any:
        self.count += self.trainer.global_rank
        return 1.0


#: name -> the module, options of the Trainer, and the words in which it is named; none if it comes back
RANKED: dict[str, tuple[type[Small], dict[str, Any], str]] = {
    "told": (Told, {}, ""),
    "told, sharded": (Told, {"strategy": "sharded"}, ""),
    "the last rank told": (LastRankTold, {}, ""),
    "one reads the module": (
        OneReadsTheModule,
        {},
        r"workers of the train loader read the module .*snapshots are taken at the ends of epochs only",
    ),
    "a count in a weight": (
        CountsInWeight,
        {},
        r"strategy ddp has these alike on all ranks, .* alone: module\.count\.",
    ),
}
