"""`torch.compile` leaves names and state as they are: a run resumes with it switched on or off."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import BestCheckpoint, Trainer, TrainingModule
from midstride.engine.errors import JobError, UserCodeError, UserError
from midstride.engine.snapshots.reader import weights_at

DATA = TensorDataset(torch.rand(16, 4, generator=torch.Generator().manual_seed(0)))
#: the step at which a life ends; an attribute would be part of the snapshot
DIES_AT = [-1]


class Net(TrainingModule):
    def __init__(self, *, compiled: bool = False) -> None:
        super().__init__()
        self.net: Any = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
        if compiled:
            self.net = torch.compile(self.net, backend="eager")

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


def _fit(made: Callable[[], Any], run: Path, dies_at: int = -1, **more: Any) -> Any:
    DIES_AT[0] = dies_at
    options: dict[str, Any] = {"snapshots": {"every_steps": 1}, "callbacks": [BestCheckpoint("loss")], **more}
    trainer = Trainer(max_epochs=2, seed=7, enable_progress_bar=False, **options)
    trainer.fit(module := made(), DataLoader(DATA, 8), run=run)
    return module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("first", "then"), [(True, False), (False, True), (True, True)])
def test_a_run_resumes_with_layers_compiled_or_not(first: bool, then: bool, tmp_path: Path) -> None:
    _fit(Net, tmp_path / "whole")
    with pytest.raises(UserCodeError):
        _fit(partial(Net, compiled=first), tmp_path / "run", dies_at=3)
    resumed = _fit(partial(Net, compiled=then), tmp_path / "run")
    assert (resumed.net._compiled_call_impl is not None) is then
    expected = weights_at(tmp_path / "whole" / "best").state_dict
    found = weights_at(tmp_path / "run" / "best").state_dict
    assert found.keys() == expected.keys() == {"net.0.weight", "net.0.bias"}
    for name, value in found.items():
        assert torch.allclose(value, expected[name])
    loaded = Net.load_from_checkpoint(tmp_path / "run" / "last", compiled=True)
    assert torch.equal(loaded.state_dict()["net.0.weight"], resumed.state_dict()["net.0.weight"])


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_module_is_trained_and_tested_compiled(tmp_path: Path) -> None:
    module = Net()
    _fit(lambda: torch.compile(module, backend="eager"), tmp_path / "run")
    assert module._compiled_call_impl is not None
    assert weights_at(tmp_path / "run" / "last").state_dict.keys() == module.state_dict().keys()


class Both(Net):
    """Calls a layer with and without its wrapper: its own calls stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = torch.compile(self.net, backend="eager")


@pytest.mark.filterwarnings("ignore")
def test_a_layer_that_is_also_used_uncompiled_is_left_alone(tmp_path: Path) -> None:
    module = _fit(Both, tmp_path / "run")
    assert module.net._compiled_call_impl is None
    assert module.fast is not module.net


class Layers(Net):
    """Calls layers, never itself, and one of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ModuleList([nn.Linear(3, 2)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == DIES_AT[0]:
            raise LookupError("dies")
        loss: Tensor = self.more[0](self.net(batch[0])).square().mean()
        self.log("loss", loss)
        return loss


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [Net, Layers])
def test_the_option_compiles_what_a_step_calls(
    kind: type[Net], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph

    name = f"noting_{kind.__name__.lower()}"
    torch._dynamo.register_backend(backend, name)
    with pytest.raises(UserCodeError, match="dies"):
        _fit(kind, tmp_path / "run", dies_at=2, compile={"backend": name})
    assert compiled
    module = _fit(kind, tmp_path / "run")
    assert "compiled was True and is False: sums may differ in their last bits" in caplog.text
    names = weights_at(tmp_path / "run" / "best").state_dict.keys()
    assert names == module.state_dict().keys()
    assert not any("_orig_mod" in name for name in names)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mod": "default"}, "compile.mod: is unknown, did you mean compile.mode"),
        ({"mode": "fast"}, "compile.mode: should be"),
        ({"mode": "default", "options": {}}, "mode or options: leave one out"),
    ],
)
def test_faulty_options_are_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        Trainer(max_epochs=1, compile=given)


def test_a_strategy_that_copies_the_module_refuses() -> None:
    with pytest.raises(JobError, match="compile with strategy dp, which calls copies"):
        Trainer(max_epochs=1, strategy="dp", compile=True).fit(Net(), DataLoader(DATA, 8))
    with pytest.raises(UserError, match="compile: Invalid backend: 'none'"):
        Trainer(max_epochs=1, compile={"backend": "none"}).fit(Net(), DataLoader(DATA, 8))
