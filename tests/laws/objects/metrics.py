"""Metrics that the code makes late, or anew."""

from typing import Any

import torchmetrics
from laws.objects.small import Rows, Small
from torch import Tensor
from torch.utils.data import DataLoader


class _Measuring(Small):
    average: torchmetrics.MeanMetric

    def factor(self, batch: Tensor) -> Any:
        self.average.update(batch.sum())
        return 1 + self.average.compute().abs()


class MeasuresLate(_Measuring):
    def on_fit_start(self) -> None:
        self.average = torchmetrics.MeanMetric()


class MeasuresInDict(Small):
    def build(self) -> None:
        self.averages = {"of batches": torchmetrics.MeanMetric(), "highest": torchmetrics.MaxMetric()}

    def factor(self, batch: Tensor) -> Any:
        return 1 + sum(metric(batch.sum()).abs() + metric.compute().abs() for metric in self.averages.values())


class MeasuresByOptimizer(_Measuring):
    def configure_optimizers(self) -> Any:
        self.average = torchmetrics.MeanMetric()
        return super().configure_optimizers()


class MeasuresAnew(_Measuring):
    """An epoch has four steps."""

    def build(self) -> None:
        self.average = torchmetrics.MeanMetric()

    def on_train_epoch_start(self) -> None:
        self.average = torchmetrics.MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("average", self.average)
        return loss

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(), 6, shuffle=True)
