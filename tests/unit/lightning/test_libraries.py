"""Modules and callbacks of libraries built on Lightning run as they do there; checks are for the user's own classes."""

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nets import Net
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Callback, Trainer
from midstride.engine.errors import JobError, UserCodeError, UserError
from midstride.engine.optim.optimizers import OptimizerList

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning as L

pytestmark = pytest.mark.filterwarnings("ignore")
DATA = TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)))


class Base(L.LightningModule):
    """A module as of a library."""

    __module__ = "a_library.models"

    def __init__(self) -> None:
        super().__init__()
        self.net, self.drop, self.scale = nn.Linear(4, 2), nn.Dropout(0.5), 1.0
        self.modes: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.scale += 0.5
        loss: Tensor = self.drop(self.net(batch[0])).square().mean() * self.scale
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.modes.append(self.drop.training)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Helpers(Base):
    """Helpers under names that Lightning once called, as in pytorch-forecasting."""

    __module__ = "a_library.models"

    def on_epoch_end(self, outputs: Any) -> None: ...

    def on_train_epoch_begin(self) -> None: ...


class SetsModes(Base):
    """Parts stay in training mode in a validation, as in chemprop."""

    __module__ = "a_library.models"

    def on_validation_model_eval(self) -> None:
        self.eval()
        self.drop.train()


class Keeps(Base):
    """Objects in a checkpoint, as in darts."""

    __module__ = "a_library.models"

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["hyper_parameters"]["seen"] = True
        checkpoint["metrics"] = [object()]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.metrics = checkpoint["metrics"]


class Bank(Base):
    """A memory bank, which no optimizer trains, as anomalib's Padim."""

    __module__ = "a_library.models"

    @staticmethod
    def configure_optimizers() -> None:
        return None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.scale += float(batch[0].sum())
        return torch.tensor(0.0, requires_grad=True)


def _fit(kind: type[Any], run: Path, epochs: int = 2, **options: Any) -> Any:
    options = {"max_epochs": epochs, "seed": 7, "snapshots": {"every_steps": 1}, **options}
    trainer = Trainer(enable_progress_bar=False, **options)
    trainer.fit(module := kind(), DataLoader(DATA, 4), DataLoader(DATA, 4), run=run)
    return module


@pytest.mark.parametrize("kind", [Helpers, SetsModes, Keeps, Bank])
def test_a_module_of_a_library_trains_and_resumes(
    kind: type[Base], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = _fit(kind, tmp_path / "whole")
    _fit(kind, tmp_path / "run", epochs=1)
    resumed = _fit(kind, tmp_path / "run")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert resumed.scale == whole.scale > 1.0
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value)
    assert whole.modes == [kind is SetsModes] * 8


class Unvalidated(Base):
    validation_step = None  # type: ignore[assignment]


def test_a_class_may_set_a_step_to_none(tmp_path: Path) -> None:
    module = _fit(Unvalidated, tmp_path)
    assert (module.modes, module.trainer.num_val_batches) == ([], [])


def test_the_same_of_a_user_is_refused(tmp_path: Path) -> None:
    own = {
        kind.__name__: type(kind.__name__, (kind,), {**vars(kind), "__module__": __name__}) for kind in (Helpers, Bank)
    }
    with pytest.raises(JobError, match=r"Helpers\.on_epoch_end would never be called"):
        _fit(own["Helpers"], tmp_path)
    with pytest.raises(UserError, match="configure_optimizers returned None"):
        _fit(own["Bank"], tmp_path)


def test_what_lightning_refuses_is_refused_of_libraries_too(tmp_path: Path) -> None:
    kind = type("Old", (Base,), {"__module__": "a_library.models", "training_epoch_end": lambda self, outputs: None})
    with pytest.raises(JobError, match=r"Old\.training_epoch_end would never be called"):
        _fit(kind, tmp_path)


class Late(Callback):
    """Its state needs what on_fit_start makes."""

    def __init__(self) -> None:
        self.steps: dict[str, int] | None = None

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.steps = self.steps or {"taken": 0}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        assert self.steps is not None
        self.steps["taken"] += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps.copy()}  # type: ignore[union-attr]

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.steps = dict(state_dict["steps"])


def test_a_callback_whose_state_begins_with_the_fit(tmp_path: Path) -> None:
    late = Late()
    _fit(Base, tmp_path / "first", epochs=1, callbacks=[late])
    _fit(Base, tmp_path / "second", epochs=1, callbacks=[late])  # from its first state
    assert late.steps == {"taken": 4}
    _fit(Base, tmp_path / "first", callbacks=[resumed := Late()])
    assert resumed.steps == {"taken": 8}


class EightBit(torch.optim.SGD):
    """Wraps part of its state for files, as bitsandbytes' optimizers do."""

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        wrapped = {
            number: {"quantized": {"momentum_buffer": state["momentum_buffer"].double()}}
            for number, state in found["state"].items()
        }
        return {**found, "state": wrapped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = {
            number: {"momentum_buffer": one["quantized"]["momentum_buffer"].float()}
            for number, one in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": state})


def test_state_that_an_optimizer_wraps_is_loaded_unwrapped() -> None:
    layer = nn.Linear(2, 1)
    optimizer = EightBit(layer.parameters(), lr=0.1, momentum=0.9)
    states = OptimizerList(lambda: [optimizer], layer)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    states.load_state_dict(states.state_dict())
    assert {key for state in optimizer.state.values() for key in state} == {"momentum_buffer"}
    optimizer.step()


class Coded(Tensor):
    """Made of two plain tensors, and knows no operation, as low-bit states of torchao."""

    def __new__(cls, codes: Tensor, scale: Tensor) -> "Coded":
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], [torch.float32]

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], context: Any, *_: Any) -> "Coded":
        assert context == [torch.float32]
        return cls(parts["codes"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(str(function))


class LowBits(torch.optim.SGD):
    """Divides gradients by their largest values so far, which it keeps in few bits."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state, largest = self.state[parameter], parameter.grad.abs().max()
            kept = state["largest"] if state else Coded(torch.zeros(4, dtype=torch.uint8), torch.zeros(1))
            kept.scale.copy_(torch.maximum(kept.scale, largest))
            kept.codes.add_(1)
            state["largest"] = kept
            with torch.no_grad():
                parameter.sub_(parameter.grad / kept.scale / kept.codes[0], alpha=0.1)


class Few(Base):
    def configure_optimizers(self) -> Any:
        return LowBits(self.parameters(), lr=0.1)


def test_state_of_few_bits_is_kept_in_its_parts(tmp_path: Path) -> None:
    whole = _fit(Few, tmp_path / "whole")
    _fit(Few, tmp_path / "run", epochs=1)
    resumed = _fit(Few, tmp_path / "run")
    assert torch.equal(resumed.net.weight, whole.net.weight)
    kept = [one["largest"] for one in resumed.trainer.optimizers[0].state.values()]
    assert [(type(one), one.codes.tolist()) for one in kept] == [(Coded, [8] * 4)] * 2


def test_a_class_that_is_not_loaded_is_refused_and_not_imported() -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters())
    optimizers = OptimizerList(lambda: [optimizer], net)
    state = {"tensor of several": "antigravity:Tensor", "parts": {}, "context": None}
    with pytest.raises(UserError, match=r"class antigravity:Tensor, which is not loaded: build the optimizer"):
        optimizers.load_state_dict({"0": {"state": {0: {"largest": state}}, "param_groups": []}})
    assert "antigravity" not in sys.modules


class Doubly(Net):
    inputs = 4

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        loss.backward()
        return loss


def test_a_backward_pass_in_the_step_is_explained(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError) as caught:
        _fit(Doubly, tmp_path)
    text = str(caught.value)
    assert text.startswith(
        "the backward pass of the loss that Doubly.training_step returned failed. training_step called"
    )
    assert "self.manual_backward(loss)" in text
    assert "optimizer_step.py" not in text
