"""Objects that classes add to a module's state_dict."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Trainer, TrainingModule
from midstride.engine.errors import UnsupportedState
from midstride.engine.modules.quantized import ModuleWeights
from midstride.engine.state.codec import decode, encode
from midstride.engine.testing import assert_resumes_exactly, run_ranks


class Arguments(nn.Linear):
    """Adds its arguments to its state, and takes them out of a state that it loads."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.arguments: dict[str, Any] = {"activation": F.gelu, "layer": nn.Linear, "sizes": (4, 4)}

    def state_dict(self, *given: Any, **options: Any) -> Any:
        state = super().state_dict(*given, **options)
        state["_arguments"] = self.arguments
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        assert state_dict.pop("_arguments") == self.arguments
        return super().load_state_dict(state_dict, strict, assign)


class Counts:
    """Counts calls."""

    def __init__(self) -> None:
        self.calls = 0


class Extra(nn.Linear):
    """Keeps an object in torch's own entry for extra state."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.counts = Counts()

    def forward(self, x: Tensor) -> Tensor:
        self.counts.calls += 1
        return super().forward(x) * (1 + 0.1 * self.counts.calls)

    def get_extra_state(self) -> Any:
        return self.counts

    def set_extra_state(self, state: Any) -> None:
        self.counts = state


class Uncounted(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(4)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.num_batches_tracked = None
        return x


class Model(TrainingModule):
    """Trains a layer of a kind."""

    def __init__(self, kind: str = "Arguments") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = KINDS[kind]()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = (self.net(batch[0]) - 1).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.linspace(-1, 1, 32).reshape(8, 4)), 2)


KINDS: dict[str, Callable[[], nn.Module]] = {kind.__name__: kind for kind in (Arguments, Extra, Uncounted)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_with_such_a_state_resumes_exactly(kind: str) -> None:
    assert_resumes_exactly(lambda: Model(kind), steps=4)


def train_sharded(folder: str) -> None:
    for epochs in (1, 2):
        Trainer(max_epochs=epochs, strategy="fully_sharded", devices=2).fit(Model(), run=f"{folder}/run")


def test_a_sharded_module_with_such_a_state_resumes(tmp_path: Path) -> None:
    assert run_ranks(train_sharded, str(tmp_path), processes=2) == [0, 0]
    assert Model.load_from_checkpoint(tmp_path / "run" / "last").net.state_dict()["_arguments"]["sizes"] == (4, 4)


@pytest.mark.parametrize("kind", ["Arguments", "Extra"])
def test_its_weights_load_into_another_module(kind: str, tmp_path: Path) -> None:
    trainer, module = Trainer(max_epochs=1), Model(kind)
    trainer.fit(module, run=str(tmp_path / "run"))

    loaded = Model.load_from_checkpoint(tmp_path / "run" / "last")

    assert all(map(torch.equal, loaded.net.parameters(), module.net.parameters()))
    assert loaded.net.state_dict().keys() == module.net.state_dict().keys()


def test_a_module_that_takes_its_own_objects_gets_them() -> None:
    trained, again = ModuleWeights(Arguments()), Arguments()
    encoded = encode(trained.state_dict())
    saved = decode(encoded.document, encoded.tensors)

    ModuleWeights(again).load_state_dict(saved)

    assert torch.equal(again.weight, saved["weight"])
    assert "_arguments" in saved  # it took them out of a copy


def test_an_object_that_no_file_can_hold_is_refused_by_its_path() -> None:
    module = Arguments()
    module.arguments["stream"] = (letter for letter in "a")
    with pytest.raises(UnsupportedState, match="_arguments/stream: "):
        encode(ModuleWeights(module).state_dict())
