"""State in slots of what training tells: data set, sampler, loader, DataModule, callback and layer."""

from collections import Counter
from typing import Any

import torch
from laws.objects.small import Rows, Small
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from midstride.engine import Callback, DataModule


class SlottedRows(Rows):
    __slots__ = ("level",)

    def __init__(self) -> None:
        super().__init__()
        self.level = 1.0

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) * self.level


class SlottedSampler(Sampler[int]):
    __slots__ = ("shift", "told")

    def __init__(self) -> None:
        self.shift, self.told = 0, Counter[str]()

    def __iter__(self) -> Any:
        return iter([(7 * row + self.shift + self.told["steps"]) % 24 for row in range(24)])

    def __len__(self) -> int:
        return 24


class SlottedLoader(DataLoader[Tensor]):
    __slots__ = ("hardness",)

    def __init__(self, workers: int) -> None:
        super().__init__(SlottedRows(), 8, sampler=SlottedSampler(), collate_fn=self.harder, num_workers=workers)
        self.hardness = 1.0

    def harder(self, rows: list[Tensor]) -> Tensor:
        return torch.stack(rows) * self.hardness


class SlottedData(DataModule):
    __slots__ = ("told", "workers")

    def __init__(self, workers: int = 0) -> None:
        self.told, self.workers = [1.0], workers

    def train_dataloader(self) -> Any:
        return SlottedLoader(self.workers)


class SlottedCallback(Callback):
    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen = 1.0


class Scaling(nn.Module):
    __slots__ = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0


class TellsSlots(Small):
    """Tells them all."""

    def build(self) -> None:
        self.scaling = Scaling()

    def train_dataloader(self) -> Any:
        return None

    def factor(self, batch: Tensor) -> Any:
        loader, data, callback = self.trainer.train_dataloader, self.trainer.datamodule, self.trainer.callbacks[0]
        assert isinstance(data, SlottedData)
        assert isinstance(callback, SlottedCallback)
        loader.dataset.level *= 1.1
        loader.hardness *= 1.2
        loader.sampler.shift += 5
        loader.sampler.told["steps"] += 1
        data.told.append(data.told[-1] * 1.3)
        callback.seen *= 1.4
        self.scaling.scale *= 1.5
        return sum(data.told) + callback.seen + self.scaling.scale
