"""`torch.compile` leaves names and state as they are: a run resumes with it switched on or off."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import BestCheckpoint, Trainer, TrainingModule
from midstride.engine.errors import UserCodeError
from midstride.engine.snapshots.reader import weights_at

DATA = TensorDataset(torch.rand(16, 4, generator=torch.Generator().manual_seed(0)))
CALLS: list[str] = []
#: the step at which a life ends; an attribute would be part of the snapshot
DIES_AT = [-1]


def _noted(graph: Any, inputs: Any) -> Any:
    """A compiler that computes as the graph does."""

    def run(*arguments: Any) -> Any:
        CALLS.append("compiled")
        return graph(*arguments)

    return run


class Net(TrainingModule):
    def __init__(self, *, compiled: bool = False) -> None:
        super().__init__()
        self.net: Any = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
        if compiled:
            self.net = torch.compile(self.net, backend=_noted)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x)
        return found

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == DIES_AT[0]:
            raise LookupError("dies")
        loss = self(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def _fit(module: Any, run: Path, dies_at: int = -1) -> None:
    DIES_AT[0] = dies_at
    options: dict[str, Any] = {"snapshots": {"every_steps": 1}, "callbacks": [BestCheckpoint("loss")]}
    Trainer(max_epochs=2, seed=7, enable_progress_bar=False, **options).fit(module, DataLoader(DATA, 8), run=run)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("first", "then"), [(True, False), (False, True), (True, True)])
def test_a_run_resumes_with_layers_compiled_or_not(first: bool, then: bool, tmp_path: Path) -> None:
    _fit(Net(), tmp_path / "whole")
    CALLS.clear()
    with pytest.raises(UserCodeError):
        _fit(Net(compiled=first), tmp_path / "run", dies_at=3)
    assert bool(CALLS) is first
    _fit(resumed := Net(compiled=then), tmp_path / "run")
    expected = weights_at(tmp_path / "whole" / "best").state_dict
    found = weights_at(tmp_path / "run" / "best").state_dict
    assert found.keys() == expected.keys() == {"net.0.weight", "net.0.bias"}
    for name, value in found.items():
        assert torch.allclose(value, expected[name])
    loaded = Net.load_from_checkpoint(tmp_path / "run" / "last", compiled=True)
    assert torch.equal(loaded.state_dict()["net.0.weight"], resumed.state_dict()["net.0.weight"])


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_module_is_trained_and_tested_compiled(tmp_path: Path) -> None:
    CALLS.clear()
    module = Net()
    _fit(torch.compile(module, backend=_noted), tmp_path / "run")
    assert CALLS
    assert weights_at(tmp_path / "run" / "last").state_dict.keys() == module.state_dict().keys()


class Both(Net):
    """Calls a layer with and without its wrapper: its own calls stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = torch.compile(self.net, backend=_noted)

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append("plain")
        found: Tensor = self.net(x)
        return found


@pytest.mark.filterwarnings("ignore")
def test_a_layer_that_is_also_used_uncompiled_is_left_alone(tmp_path: Path) -> None:
    CALLS.clear()
    _fit(Both(), tmp_path / "run")
    assert {*CALLS} == {"plain"}
