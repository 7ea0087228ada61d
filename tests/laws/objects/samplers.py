"""State in samplers and streams."""

import threading
from typing import Any

import torch
import torch.nn.utils.prune
from laws.objects.small import Rows, Small
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Sampler,
)


class Drawing(Sampler[int]):
    """Draws anew whenever its epoch begins, from a generator of its own; rows differ in what their state lacks."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Any:
        self.epoch += 1
        return iter(torch.randperm(24, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self) -> int:
        return 24

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


class Forgetting(Drawing):
    """Its state lacks the epoch."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Asked(Drawing):
    """Its state counts how often it was given one."""

    loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "loads": self.loads}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.loads += 1


class Expecting(Drawing):
    """Takes back less than training gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "losses": self.losses.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.losses = torch.zeros(2).copy_(state["losses"])


class Samples(Small):
    """Reads by a sampler of its own, and tells it what it lost."""

    sampler: type[Drawing] = Drawing

    def build(self) -> None:
        self.drawing = self.sampler()

    def factor(self, batch: Tensor) -> Any:
        if isinstance(self.drawing, Expecting):
            self.drawing.losses = torch.cat([self.drawing.losses, batch.detach().sum(1)])
        return 1.0

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(), 4, sampler=self.drawing)


class SamplesForgetting(Samples):
    sampler = Forgetting


class SamplesAsked(Samples):
    sampler = Asked


class SamplesExpecting(Samples):
    sampler = Expecting


class Stream(IterableDataset[Tensor]):
    """Its state is none that can be written."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Any:
        self.position = 0
        for row in Rows().rows:
            self.position += 1
            yield row

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "lock": threading.Lock()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Streams(Small):
    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), 4)


class Looping(DataLoader[Tensor]):
    """A loader with a way of its own to iterate."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


class Loops(Small):
    def train_dataloader(self) -> Any:
        return Looping(Rows(), 4)
