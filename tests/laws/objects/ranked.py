"""What ranks of one world hold. They import this file for themselves, and so it imports no large library."""

import copy
import logging
from pathlib import Path
from typing import Any

import torch
from laws.objects.small import Rows, Small
from torch import Tensor, nn
from torch.utils.data import DataLoader

from midstride.engine import Trainer

STEPS, CUT = 5, 2


class Told(Small):
    """Each rank tells its data, and keeps a count, in its own way."""

    workers = 0

    def build(self) -> None:
        self.loader = DataLoader(Rows(), 4, shuffle=True, num_workers=self.workers)
        self.seen = [0.0]
        self.register_buffer("told", torch.zeros(2))

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


class HoldsModule(Rows):
    def __init__(self, module: Small) -> None:
        super().__init__()
        self.module = module


class OneReadsTheModule(Small):
    """The data of one rank alone hold the module."""

    def train_dataloader(self) -> Any:
        data = HoldsModule(self) if self.trainer.global_rank == 0 else Rows()
        return DataLoader(data, 4, num_workers=1)


class Recurs(Small):
    """Carries the hidden state of a recurrent layer from batch to batch."""

    def build(self) -> None:
        self.recurrent = nn.LSTM(1, 4)
        self.hidden: Any = None

    def factor(self, batch: Tensor) -> Any:
        outputs, hidden = self.recurrent(batch.sum().view(1, 1, 1), self.hidden)
        self.hidden = tuple(state.detach() for state in hidden)
        return 1 + outputs.sum()


class CountsInWeight(Small):
    """Counts in a parameter that is not trained."""

    def build(self) -> None:
        self.count = nn.Parameter(torch.zeros(3), requires_grad=False)

    def factor(self, batch: Tensor) -> Any:
        self.count += self.trainer.global_rank
        return 1.0


class Averages(Small):
    """Averages of weights that are cut over the ranks: made before training and in it, and as a layer."""

    def build(self) -> None:
        self.wide, self.blocks = nn.Linear(2, 5), nn.ModuleList([nn.Linear(2, 2)])
        self.late: dict[str, Tensor] = {}
        self.of_weight: Tensor | None = None

    def configure_optimizers(self) -> Any:
        self.early = {name: weight.detach().clone() for name, weight in self.named_parameters()}
        self.layers = [copy.deepcopy(self.wide)]
        return super().configure_optimizers()

    def factor(self, batch: Tensor) -> Any:
        held: list[Any] = [*self.early.values(), *self.late.values(), *self.layers[0].parameters()]
        held += [] if self.of_weight is None else [self.of_weight]
        return self.wide(self.blocks[0](batch)).mean() + sum(one.detach().full_tensor().sum() for one in held)

    def on_train_batch_end(self, *arguments: Any) -> None:
        for name, weight in self.named_parameters():
            self.early[name].lerp_(weight.detach(), 0.1)
            self.late[name] = weight.detach() if name not in self.late else self.late[name] * 0.9
        for average, weight in zip(self.layers[0].parameters(), self.wide.parameters(), strict=True):
            average.detach().lerp_(weight.detach(), 0.1)
        if self.of_weight is None:
            self.of_weight = self.wide.weight.detach()  # in its memory


class KeepsWhole(Small):
    """Keeps the weight that a step has gathered."""

    def factor(self, batch: Tensor) -> Any:
        self.held = [self.layer.weight]
        return 1.0


class StagedBesideItsLoader(Small):
    """Layers in stages, and the module has its loader."""

    def build(self) -> None:
        del self.layer
        self.sequential_module = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 1))
        self.loader = DataLoader(Rows(), 4, shuffle=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.sequential_module(batch)

    def training_step_end(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.square().mean()


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
        r"strategy ddp keeps these equal on all ranks, .* only: module\.count\.",
    ),
    "a recurrent layer, sharded": (Recurs, {"strategy": "sharded"}, ""),
    "averages, sharded": (Averages, {"strategy": "sharded"}, ""),
    "averages, fully sharded": (Averages, {"strategy": "fully_sharded"}, ""),
    "a gathered weight": (
        KeepsWhole,
        {"strategy": "sharded"},
        r"the module's attribute held\.0, a freed Parameter, is not part of snapshots",
    ),
    "a loader, staged": (StagedBesideItsLoader, {"strategy": "pipeline"}, ""),
}


def train(made: Any, run: Path, strategy: str = "auto") -> Any:
    module, data, callbacks = made
    trainer = Trainer(
        strategy=strategy,
        max_steps=STEPS,
        val_check_interval=CUT,
        seed=7,
        callbacks=callbacks(),
        snapshots={"every_steps": 1, "keep": 100},
        enable_progress_bar=False,
    )
    trainer.fit(built := module(), None if data is None else data(), run=str(run))
    return built


def train_ranked(name: str, folder: str, run: str) -> None:
    module, options, _ = RANKED[name]
    logging.basicConfig(filename=f"{folder}/log", format="%(levelname)s %(message)s", force=True)
    snapshots = {"every_steps": 1, "keep": 100}
    trainer = Trainer(max_steps=STEPS, seed=7, snapshots=snapshots, enable_progress_bar=False, **options)
    trainer.fit(module(), run=f"{folder}/{run}")
