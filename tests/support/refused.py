"""Modules, data and callbacks that a fit refuses, or that fail in it."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from midstride.engine import Callback, Trainer, TrainingModule


class Numbers(Dataset[Tensor]):
    def __init__(self, samples: int = 8) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((2,), float(index))


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        yield torch.zeros(2)


class Sized(IterableDataset[Tensor]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Any:
        return iter(torch.zeros(self.samples, 2))


class Empty(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(())


class Lines(IterableDataset[Tensor]):
    def __init__(self, lines: int) -> None:
        self.lines = lines

    def __iter__(self) -> Any:
        return (torch.full((2,), float(line)) for line in range(self.lines))


class Torn(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        yield torch.zeros(2)
        raise OSError("no line 1")


class Secretive(Endless):
    def state_dict(self) -> dict[str, Any]:
        return {"source": Numbers()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class Module(TrainingModule):
    def __init__(self, act: Callable[[Any, int], Tensor] | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.act = act

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.act(self, batch_idx) if self.act else self.layer(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(run: Path | None = None, *, module: TrainingModule | None = None, data: Any = None, **options: Any) -> None:
    loader = data if data is not None else DataLoader(Numbers(), 2, shuffle=True)
    options = {"max_epochs": 1, "snapshots": {"every_steps": 1}, **options}
    Trainer(**options).fit(module or Module(), loader, run=None if run is None else str(run))


class Forgets(Sampler[int]):
    """What it does next stands in a generator, which cannot be read."""

    def __init__(self) -> None:
        self.starts = (number for number in itertools.count(1))

    def __iter__(self) -> Iterator[int]:
        start = next(self.starts)
        return iter([(start + number) % 8 for number in range(8)])


class Forever(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(8))


class Rows(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(self.samples, 2)[index]


class Counting(Numbers):
    calls = 0

    def __getitem__(self, index: int) -> Tensor:
        self.calls += 1
        return super().__getitem__(index) + self.calls


class Unseeded(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + float(np.random.default_rng().random())


def broken(module: Module, batch_idx: int) -> Tensor:
    if batch_idx == 2:
        raise KeyError("colour")
    return module.layer(torch.ones(1, 2)).mean()


def infinite(module: Module, batch_idx: int) -> Tensor:
    return module.layer(torch.ones(1, 2)).mean() * (float("nan") if batch_idx == 3 else 1.0)


class Bad(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        raise IndexError(f"row {index} has no image")


def unequal(samples: list[Tensor]) -> Tensor:
    raise ValueError(f"{len(samples)} shapes differ")


class Odd(Module):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["tokenizer"] = {"words": Numbers()}


def unlogged(name: str, value: Any, **options: Any) -> Callable[[Any, int], Tensor]:
    def act(module: Module, batch_idx: int) -> Tensor:
        module.log(name, value, **options)
        return module.layer(torch.ones(1, 2)).mean()

    return act


class Validated(Module):
    def __init__(self, validation: Any) -> None:
        super().__init__()
        self._loaders = {"train": DataLoader(Numbers(), 2), "val": validation}

    def train_dataloader(self) -> Any:
        return self._loaders["train"]

    def val_dataloader(self) -> Any:
        return self._loaders["val"]


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


class OnlyBatch(Module):
    """Takes no index of its batch, as Lightning allows."""

    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        return super().training_step(batch, 0)


class ByHand(Module):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.layer(batch).mean() * float("inf"))


class Raising(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return 1 / 0


class Forgetful(Module):
    """Says more than it takes back."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = next(COUNT)


class Elsewhere(Module):
    """Says what another life does not."""

    life = 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.life


class Ported(Module):
    """Written for Lightning 1."""

    def training_epoch_end(self, outputs: Any) -> None: ...
    def configure_sharded_model(self) -> None: ...
    def on_training_epoch_end(self) -> None: ...
    def on_my_own(self) -> None: ...


class Eager(Callback):
    def on_epoch_end(self, *arguments: Any) -> None: ...


COUNT = itertools.count()


def sometimes(first: int, returned: Any = None) -> Callable[[Any, int], Any]:
    """A loss from batch `first` of each epoch on."""
    return lambda module, batch_idx: returned if batch_idx < first else module.layer(torch.ones(1, 2)).mean()


class Lazy(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(1)


class Scaling(Module):
    """Has from `setup` on an embedding that scales its rows."""

    def setup(self, stage: str) -> None:
        self.rows = nn.Embedding(4, 2, max_norm=1.0)


class Curved(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Stepping(Module):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        optimizer.step()


class Idle(Curved):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        pass


def configured(make: Callable[[Module, Any], Any]) -> Module:
    """A module whose optimizers are what `make` returns for it and an SGD over it."""

    class Configured(Module):
        def configure_optimizers(self) -> Any:
            return make(self, torch.optim.SGD(self.parameters(), lr=0.1))

    return Configured()


def made_anew(module: Module, batch_idx: int) -> Tensor:
    return torch.tensor(module.layer(torch.ones(1, 2)).mean().item(), requires_grad=True)


def cut_off(module: Module, batch_idx: int) -> Tensor:
    return module.layer(torch.ones(1, 2)).mean().detach()
