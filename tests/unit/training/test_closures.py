"""Optimizers that evaluate a batch several times in one step, and steps that a module makes itself."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Trainer, TrainingModule
from midstride.engine.errors import UserError
from midstride.engine.state.codec import differences


class Line(TrainingModule):
    """Learns y = 2x."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self._calls: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Curved(Line):
    """Learns by LBFGS, which evaluates a batch as often as it wants."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class CurvedByHand(Curved):
    """Makes its steps itself."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        self._calls.append("optimizer_step")
        optimizer.step(optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self._calls.append("optimizer_zero_grad")
        optimizer.zero_grad()


class CurvedLater(Line):
    """Changes to LBFGS after an epoch."""

    def on_train_epoch_start(self) -> None:
        if self.trainer.current_epoch == 1:
            self.trainer.optimizers = [torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)]


def points() -> DataLoader[Any]:
    x = torch.arange(8.0)[:, None] / 8
    return DataLoader(TensorDataset(x, 2 * x), 4)


def test_a_step_of_ones_own_has_the_closure() -> None:
    weights = []
    for kind in (Curved, CurvedByHand):
        torch.manual_seed(0)
        module = kind()
        Trainer(max_epochs=2).fit(module, points())
        weights.append(module.state_dict())
        by_hand = [call for call in module._calls if call.startswith("optimizer_")]
        assert by_hand == (["optimizer_step", "optimizer_zero_grad"] * 4 if kind is CurvedByHand else [])
    assert not differences(*weights)


def test_an_optimizer_that_takes_anothers_place_has_its_closure() -> None:
    batches = points()
    module, like = CurvedLater(), Line()
    like.load_state_dict(module.state_dict())
    Trainer(max_epochs=2).fit(module, batches)
    sgd = torch.optim.SGD(like.parameters(), lr=0.1)
    lbfgs = torch.optim.LBFGS(like.parameters(), lr=0.1, max_iter=3)
    for optimizer in (sgd, lbfgs):
        for one, two in batches:

            def closure(one: Tensor = one, two: Tensor = two) -> Tensor:
                like.zero_grad()
                loss = mse_loss(like.layer(one), two)
                loss.backward()
                return loss

            optimizer.step(closure)
    assert not differences(module.state_dict(), like.state_dict())


def test_an_optimizer_that_takes_anothers_place_may_be_refused() -> None:
    with pytest.raises(UserError, match="accumulate_grad_batches=2 with LBFGS"):
        Trainer(max_epochs=2, accumulate_grad_batches=2).fit(CurvedLater(), points())
