"""Weights of libraries' own classes are in snapshots and in the weights of a run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.libraries import library
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Trainer, TrainingModule
from midstride.engine.testing import assert_resumes_exactly

augment = library("augment")


def eight_bit() -> nn.Module:
    layer = nn.Linear(4, 4)
    augment.quantize(layer)
    return layer


BASES: dict[str, Callable[[], nn.Module]] = {"8 bits": eight_bit, "4 bits": lambda: augment.FourBit(4)}


class Head(TrainingModule):
    """Trains a layer on a quantized base."""

    def __init__(self, base: str = "8 bits") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.base, self.head = BASES[base](), nn.Linear(4, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.head(self.base(batch[0])).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(32.0).reshape(8, 4)), 2)


@pytest.mark.parametrize("base", BASES)
def test_a_head_on_a_quantized_base_resumes_exactly(base: str) -> None:
    assert_resumes_exactly(lambda: Head(base), steps=4)


@pytest.mark.parametrize("base", BASES)
def test_quantized_weights_load_into_another_module(base: str, tmp_path: Path) -> None:
    trainer, module = Trainer(max_epochs=1), Head(base)
    trainer.fit(module, run=str(tmp_path / "run"))

    loaded = Head.load_from_checkpoint(tmp_path / "run" / "last")

    batch = torch.ones(1, 4)
    assert torch.equal(loaded.head(loaded.base(batch)), module.head(module.base(batch)))
