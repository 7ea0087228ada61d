"""Optimizers that evaluate a batch several times in one step, and steps that a module makes itself."""

from typing import Any

import pytest
import torch
from support.nets import Net
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Trainer
from midstride.engine.errors import UserError
from midstride.engine.state.differences import differences


class Line(Net):
    """Learns y = 2x."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return mse_loss(self.layer(batch[0]), batch[1])


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


class Sharpness(torch.optim.SGD):
    """Computes gradients once more where the weights have moved along the first ones, as the optimizers of SAM do."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "needs a closure"
        parameters = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            moves = [p.grad * 0.5 for p in parameters]
            torch._foreach_add_(parameters, moves)
            with torch.enable_grad():
                closure()
            torch._foreach_sub_(parameters, moves)
        return super().step()


class SharpnessDeclared(Sharpness):
    """Declares that it needs its closure."""

    def step(self, closure: Any) -> Any:
        with torch.no_grad():  # as the step of most runs
            closure()
        return super().step(closure)


class Sharp(Line):
    """Learns by one of the two."""

    kind: type[Sharpness] = Sharpness

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.1)


class SharpByHand(Sharp):
    """Gives it the closure."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer.step(closure=optimizer_closure)


class SharpDeclared(Sharp):
    kind = SharpnessDeclared


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


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Sharp, r"Sharpness.step was called without a closure. Declare it as `def step\(self, closure\)`"),
        (SharpByHand, r"Sharpness.step called its closure after .* Declare it as `def step\(self, closure\)`"),
    ],
)
def test_a_step_that_needs_a_closure_says_how_to_declare_it(kind: type[Line], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Trainer(max_epochs=1).fit(kind(), points())


class CallsClosure(Sharpness):
    """Calls it without a look at whether there is one."""

    def step(self, closure: Any = None) -> Any:
        return closure()


class Fails(Sharpness):
    """Fails for another reason."""

    def step(self, closure: Any = None) -> Any:
        raise ValueError("no memory is left")


@pytest.mark.parametrize(("kind", "is_told"), [(CallsClosure, True), (Fails, False)])
def test_only_errors_of_a_missing_closure_mention_it(kind: type[Sharpness], is_told: bool) -> None:
    module = Sharp()
    module.kind = kind
    with pytest.raises(UserError) as raised:
        Trainer(max_epochs=1).fit(module, points())
    assert ("was called without a closure" in str(raised.value)) == is_told


def test_a_step_that_declares_a_closure_gets_its_gradients() -> None:
    module, like = SharpDeclared(), Line()
    like.load_state_dict(module.state_dict())
    batches = points()
    Trainer(max_epochs=2).fit(module, batches)
    optimizer = torch.optim.SGD(like.parameters(), lr=0.1)
    for one, two in [*batches] * 2:
        optimizer.zero_grad()
        mse_loss(like.layer(one), two).backward()
        moves = [p.grad * 0.5 for p in like.parameters() if p.grad is not None]
        with torch.no_grad():
            torch._foreach_add_([*like.parameters()], moves)
        optimizer.zero_grad()
        mse_loss(like.layer(one), two).backward()
        with torch.no_grad():
            torch._foreach_sub_([*like.parameters()], moves)
        optimizer.step()
    assert not differences(module.state_dict(), like.state_dict())
