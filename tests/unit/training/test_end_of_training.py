"""The end of a fit: hooks that change the finished module, and what they log."""

import csv
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Trainer, TrainingModule
from midstride.engine.snapshots.reader import weights_at
from midstride.engine.state.differences import differences
from midstride.engine.testing import final_state

DATA = TensorDataset(torch.randn(32, 8, generator=torch.Generator().manual_seed(0)))


class Net(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)
        self.build()
        self.ended = 0

    def build(self) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Pruned(Net):
    def build(self) -> None:
        prune.identity(self.net, "weight")

    def on_train_epoch_end(self) -> None:
        prune.l1_unstructured(self.net, "weight", amount=0.2)

    def on_train_end(self) -> None:
        prune.remove(self.net, "weight")


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2.0 * weight


class Parametrized(Net):
    def build(self) -> None:
        parametrize.register_parametrization(self.net, "weight", Doubled())

    def on_train_end(self) -> None:
        parametrize.remove_parametrizations(self.net, "weight")


class Merged(Net):
    """A low-rank addition that becomes part of the weights, as LoRA's `merge_and_unload`."""

    def build(self) -> None:
        self.down, self.up = nn.Linear(8, 1, bias=False), nn.Linear(1, 3, bias=False)

    def on_train_end(self) -> None:
        with torch.no_grad():
            self.net.weight.add_(self.up.weight @ self.down.weight)
        del self.down, self.up


class Averaged(Net):
    """Only values change; they are those of no step."""

    def on_train_end(self) -> None:
        assert gc.isenabled()  # it is off while states are copied
        with torch.no_grad():
            self.net.weight.mul_(0.5)
        self.ended += 1
        torch.rand(3)


class Quantized(Net):
    def build(self) -> None:
        quantization: Any = torch.ao.quantization
        self.net = nn.Sequential(quantization.QuantStub(), nn.Linear(8, 3), quantization.DeQuantStub())  # type: ignore[assignment]
        self.net.qconfig = quantization.get_default_qat_qconfig("qnnpack")
        quantization.prepare_qat(self.net.train(), inplace=True)

    def on_train_end(self) -> None:
        torch.ao.quantization.convert(self.net.eval(), inplace=True)


def _fit(kind: type[Net], run: Path, epochs: int = 2) -> Net:
    trainer = Trainer(max_epochs=epochs, seed=7, snapshots={"every_steps": 2}, enable_progress_bar=False)
    trainer.fit(module := kind(), DataLoader(DATA, 8), run=run)
    return module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [Pruned, Parametrized, Merged, Averaged])
def test_what_the_end_changes_is_in_the_last_weights_alone(kind: type[Net], tmp_path: Path) -> None:
    ended = _fit(kind, tmp_path / "run")
    again = _fit(kind, tmp_path / "run")
    for module in (ended, again):
        assert not differences(weights_at(tmp_path / "run" / "last").state_dict, dict(module.state_dict()))
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 9
    assert again.ended == ended.ended
    (state,) = final_state(str(tmp_path / "run"))
    assert state["module"].keys() == kind().state_dict().keys()


@pytest.mark.filterwarnings("ignore")
def test_weights_that_no_file_can_hold_are_those_before_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        _fit(Quantized, tmp_path / "run")
        assert "`last` holds the weights from before on_train_end" in caplog.text
        found = weights_at(tmp_path / "run" / "last").state_dict
        assert found.keys() == Quantized().state_dict().keys()


def test_a_longer_run_continues_from_before_the_end(tmp_path: Path) -> None:
    _fit(Averaged, tmp_path / "run")
    longer, whole = _fit(Averaged, tmp_path / "run", epochs=3), _fit(Averaged, tmp_path / "whole", epochs=3)
    assert not differences(dict(longer.state_dict()), dict(whole.state_dict()))
    assert (tmp_path / "run" / "metrics.csv").read_text() == (tmp_path / "whole" / "metrics.csv").read_text()


class Named(Net):
    """Values under the names of the log's own columns."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("epoch", 40.0 + batch_idx)
        self.log("step", 1.0, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def test_values_called_epoch_and_step_have_columns_of_their_own(tmp_path: Path) -> None:
    module = _fit(Named, tmp_path / "run", epochs=1)
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").read_text().splitlines()))
    assert [(row["epoch"], row["step"], row["logged_epoch"]) for row in rows] == [
        ("0", str(1 + at), f"{40.0 + at}") for at in range(4)
    ]
    assert [row["logged_step"] for row in rows] == ["", "", "", "1.0"]
    values = module.trainer.callback_metrics
    assert (values["epoch"], values["step"]) == (43.0, 1.0)
