"""Evaluation over any number of ranks: every sample once, nothing padded, the same values everywhere."""

import json
import math
import os
import random
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from laws.horovod_world import run_horovod_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import CatMetric, MeanMetric

from midstride.engine import Callback, DataModule, Trainer, TrainingModule
from midstride.engine.testing import run_ranks

DRAWS = random.Random(3)


class Tally(Callback):
    """Counts samples where the module tells it to."""

    def __init__(self) -> None:
        self.samples = 0


class Numbers(Dataset[Tensor]):
    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.told = 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class Counts(TrainingModule):
    """Logs what it sees in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.mean = MeanMetric()
        self.all = CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch).mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.layer(batch)
        self.count(len(batch), dataloader_idx)
        over_all: dict[str, Any] = {"sync_dist": True, "add_dataloader_idx": False}
        self.log("sum", batch.sum(), reduce_fx="sum", **over_all)
        self.log("mean", batch.mean(), on_step=True, **over_all)
        self.log("largest", batch.max(), reduce_fx="max", **over_all)
        self.log("smallest", batch.min(), reduce_fx="min", **over_all)
        self.log("count", float(len(batch)), reduce_fx="sum", **over_all)
        self.log("own", float(len(batch)), on_step=True, on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.mean.update(batch)
        self.all.update(batch)
        self.log("metric", self.mean, add_dataloader_idx=False)
        self.log("all", self.all, add_dataloader_idx=False)

    def count(self, samples: int, loader: int) -> None:
        """Count where another rank's batch must not be counted: beside the module."""
        self.trainer.callbacks[0].samples += samples
        self.trainer.samples = getattr(self.trainer, "samples", 0) + samples
        self.trainer.datamodule.data[loader].told += samples
        for _ in range(samples):
            DRAWS.random()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(DataModule):
    def __init__(self, sizes: list[int]) -> None:
        self.data = [Numbers(size) for size in sizes]

    def val_dataloader(self) -> list[DataLoader[Any]]:
        return [DataLoader(numbers, 2, shuffle=True) for numbers in self.data]


#: samples of each loader
SIZES = [[5], [2], [7, 1]]


def validate(folder: str, strategy: str | None) -> None:
    for number, sizes in enumerate(SIZES):
        tally, data = Tally(), Data(sizes)
        trainer = Trainer(max_epochs=1, strategy=strategy, callbacks=[tally])
        drawn = random.Random()
        drawn.setstate(DRAWS.getstate())
        values = trainer.validate(Counts(), data)
        for _ in range(tally.samples):
            drawn.random()
        assert drawn.getstate() == DRAWS.getstate()
        counted = [tally.samples, getattr(trainer, "samples", 0), sum(numbers.told for numbers in data.data)]
        found = {"values": values, "steps": trainer.metric_logger.step_values["mean_step"]}
        Path(folder, f"{number}-{trainer.world.rank}.json").write_text(json.dumps([counted, found]))


@pytest.mark.parametrize(
    ("ranks", "start", "strategy"),
    [
        (1, run_ranks, None),
        (2, run_ranks, None),
        (3, run_ranks, None),
        (3, run_ranks, "fully_sharded"),
        (3, run_horovod_ranks, None),
    ],
)
def test_every_sample_counts_once(
    ranks: int, start: Callable[..., list[int]], strategy: str | None, tmp_path: Path
) -> None:
    assert start(validate, str(tmp_path), strategy, processes=ranks) == [0] * ranks
    for number, sizes in enumerate(SIZES):
        told = [json.loads((tmp_path / f"{number}-{rank}.json").read_text()) for rank in range(ranks)]
        counted, found = zip(*told, strict=True)
        assert [sum(column) for column in zip(*counted, strict=True)] == [sum(sizes)] * 3
        assert all(other == found[0] for other in found)
        assert_counted_once(found[0]["values"], sizes)
        assert len(found[0]["steps"]) == sum(math.ceil(math.ceil(size / ranks) / 2) for size in sizes)


def assert_counted_once(values: dict[str, float], sizes: list[int]) -> None:
    numbers = [float(number) for size in sizes for number in range(size)]
    assert values["sum"] == sum(numbers)
    assert values["count"] == len(numbers)
    assert (values["smallest"], values["largest"]) == (0.0, max(numbers))
    assert values["mean"] == pytest.approx(sum(numbers) / len(numbers), abs=1e-12)
    assert values["metric"] == pytest.approx(sum(numbers) / len(numbers), abs=1e-6)
    assert sorted(values[name] for name in values if name.startswith("all")) == sorted(numbers)
    for number, size in enumerate(sizes):
        suffix = f"/dataloader_idx_{number}" if len(sizes) > 1 else ""
        assert values[f"own{suffix}"] == values[f"own_epoch{suffix}"] == size


class Gathers(Counts):
    """Exchanges what its ranks have seen, and prints."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen = {"first": batch[0], "both": [batch.sum(), "text"]}

    def on_validation_epoch_end(self) -> None:
        self.print(self.all_gather(self.seen), flush=True)


def gather_and_print(folder: str) -> None:
    with Path(folder, os.environ.get("RANK", "0")).open("w") as file, redirect_stdout(file):
        Trainer().validate(Gathers(), Data([2]))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_module_gathers_over_ranks_and_prints_on_one(ranks: int, tmp_path: Path) -> None:
    assert run_ranks(gather_and_print, str(tmp_path), processes=ranks) == [0] * ranks
    printed = [(tmp_path / str(rank)).read_text() for rank in range(ranks)]
    shape = "tensor([[" if ranks > 1 else "tensor(["
    assert printed[0].startswith(f"{{'first': {shape}")
    assert printed[0].endswith("'text']}\n")
    assert printed[1:] == [""] * (ranks - 1)
