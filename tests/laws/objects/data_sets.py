"""State in data sets that are no class of the user's: lists, dicts, and torch's own around others."""

from typing import Any

import torch
from laws.objects.small import Rows, Small
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, StackDataset, Subset, TensorDataset


class Relabels(Small):
    """Writes to a data set that its loader alone has."""

    workers = 0

    def data(self) -> Any:
        return [*Rows().rows]

    def train_dataloader(self) -> Any:
        return DataLoader(self.data(), 4, shuffle=True, num_workers=self.workers, collate_fn=stacked)

    def factor(self, batch: Tensor) -> Any:
        self.relabel(self.trainer.train_dataloader.dataset)
        return 1.0

    def relabel(self, data: Any) -> None:
        row = int(self.global_step) * 5 % len(data)
        data[row] = data[row] * 2


def stacked(rows: list[Any]) -> Tensor:
    return torch.stack([row if isinstance(row, Tensor) else torch.stack(list(row)).sum(0) for row in rows])


class RelabelsForWorkers(Relabels):
    workers = 1


class Named(list[Tensor]):
    """A list of the user's."""


class RelabelsNamed(Relabels):
    def data(self) -> Any:
        return Named(Rows().rows)


class Rechooses(Relabels):
    """Moves the window that a subset of a list shows."""

    def data(self) -> Any:
        return Subset([*Rows().rows], range(12))

    def relabel(self, data: Any) -> None:
        super().relabel(data.dataset)
        data.indices = range(int(self.global_step), int(self.global_step) + 12)


class RechoosesForWorkers(Rechooses):
    workers = 1


class Restacks(Relabels):
    """Tells what torch's own data sets stack and chain."""

    def data(self) -> Any:
        return StackDataset(Rows(), ConcatDataset([Subset(Rows(), [*range(12)]), Subset(Rows(), [*range(12)])]))

    def relabel(self, data: Any) -> None:
        data.datasets[0].scale *= 1.2
        data.datasets[1].datasets[1].dataset.scale *= 1.3
        data.datasets[1].datasets[0].indices.reverse()


class RelabelsTensors(Relabels):
    def data(self) -> Any:
        return TensorDataset(Rows().rows)

    def relabel(self, data: Any) -> None:
        data.tensors[0].mul_(1.1)
