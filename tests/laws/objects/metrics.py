"""Metrics that the code makes late, or anew."""

from typing import Any

import torchmetrics
from laws.objects.small import Rows, Small
from torch import Tensor, nn
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


class MeasuresGraphs(Small):
    """Gives a metric predictions as they come out of a layer."""

    def build(self) -> None:
        self.every = torchmetrics.CatMetric()

    def factor(self, batch: Tensor) -> Any:
        self.every.update(self.layer(batch))
        assert self.every.value[-1].requires_grad
        return 1 + self.every.compute().detach().abs().mean()


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


class MeasuresMidway(Small):
    """Training makes metrics, some of them in others and all with functions that they share."""

    def factor(self, batch: Tensor) -> Any:
        if self.global_step == 1:
            in_one = torchmetrics.MetricCollection([torchmetrics.MeanMetric(), torchmetrics.SumMetric()])
            newest = torchmetrics.wrappers.Running(torchmetrics.SumMetric(), 2)
            self.layer.measured = nn.ModuleDict({"whole": in_one, "newest": newest})
            self.total = torchmetrics.SumMetric()
            self.beside = {"smallest": torchmetrics.MinMetric()}
        if self.global_step < 1:
            return 1.0
        metrics = [*self.layer.measured.values(), self.total, self.beside["smallest"]]
        for metric in metrics:
            metric.update(batch.sum())
        whole, *others = [metric.compute() for metric in metrics]
        return 1 + sum(value.abs() for value in [*whole.values(), *others])


class Tracks(Small):
    """An epoch has four steps."""

    def build(self) -> None:
        self.history = torchmetrics.MetricTracker(torchmetrics.MeanMetric(), maximize=False)

    def on_train_epoch_start(self) -> None:
        self.history.increment()

    def factor(self, batch: Tensor) -> Any:
        self.history.update(batch.sum())
        return 1 + self.history.compute_all().abs().sum()

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(), 6, shuffle=True)


class ActsLate(Small):
    """A layer that comes up in training has functions of torch's."""

    acts: nn.Module

    def factor(self, batch: Tensor) -> Any:
        if self.global_step == 1:
            self.acts = nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0)
            self.optimizers().add_param_group({"params": self.acts.parameters()})
        return 1 + self.acts(batch).square().mean() if self.global_step else 1.0
