"""Objects of several rows in one module, and what ranks do with them: they import this file, and no large library."""

import logging
from pathlib import Path
from typing import Any

import torch
from laws.objects.attributes import Hooked, HookedByObject, SharedDeque, SharedDict
from laws.objects.generators import Generators, Iterators
from laws.objects.python_values import Arrays, Containers, Late, Tensors, Viewed
from laws.objects.ranked import train
from laws.objects.samplers import Samples
from laws.objects.surroundings import Curriculum, Watching
from laws.objects.unsaved import LockedByRank, Metered
from torch import Tensor
from torch.utils.data import DataLoader

from midstride.engine import Trainer

#: what is shared, filled in place, drawn from and built in training
TOGETHER = (
    *(SharedDeque, SharedDict, Hooked, HookedByObject, Viewed, Tensors, Arrays, Containers, Iterators, Generators),
    *(Late, Metered, Samples, Watching),
)


class Together(*TOGETHER):  # type: ignore[misc]
    """Has the objects of all of them."""

    def build(self) -> None:
        for kind in TOGETHER:
            kind.build(self)
        self.window = self.recent  # of two of them

    def factor(self, batch: Tensor) -> Any:
        return 2 + torch.as_tensor(sum(kind.factor(self, batch) for kind in TOGETHER)).sin()  # of a bounded size

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset, 4, sampler=self.drawing)


def train_together(run: str) -> None:
    train((Together, None, lambda: [Curriculum()]), Path(run))


def train_logged(folder: str) -> None:
    logging.basicConfig(filename=f"{folder}/log", format="%(levelname)s %(message)s", force=True)
    trainer = Trainer(strategy="ddp", max_steps=2, snapshots={"every_steps": 1}, enable_progress_bar=False)
    trainer.fit(LockedByRank(), run=f"{folder}/run")
