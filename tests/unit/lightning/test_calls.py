"""Lightning's calls: names of arguments, arguments that ask for nothing, paths of checkpoints, its own Trainer."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Trainer
from midstride.engine.errors import JobError, UserError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, RandomDataset

pytestmark = pytest.mark.filterwarnings("ignore")

Call = Callable[[Trainer, Any, Any], Any]
CALLS: dict[str, Call] = {
    "fit with a data module": lambda t, m, d: t.fit(m, datamodule=BoringDataModule()),  # type: ignore[call-arg]
    "fit with loaders": lambda t, m, d: t.fit(model=m, train_dataloaders=d, val_dataloaders=d, ckpt_path=None),  # type: ignore[call-arg]
    "fit with old names": lambda t, m, d: t.fit(m, train_dataloader=d, val_dataloader=d),  # type: ignore[call-arg]
    "fit with nothing else": lambda t, m, d: t.fit(m, d, datamodule=None, weights_only=None),  # type: ignore[call-arg]
    "fit in their places": lambda t, m, d: t.fit(m, None, None, BoringDataModule(), None),  # type: ignore[call-arg]
    "test in their places": lambda t, m, d: t.test(m, d, None, False),  # type: ignore[call-arg]
    "predict after fit, in their places": lambda t, m, d: (t.fit(m, d), t.predict(m, d, None, True)),  # type: ignore[call-arg]
    "test with loaders": lambda t, m, d: t.test(m, dataloaders=d, verbose=False),  # type: ignore[call-arg]
    "test with a data module": lambda t, m, d: t.test(model=m, datamodule=BoringDataModule()),  # type: ignore[call-arg]
    "validate after fit": lambda t, m, d: (t.fit(m, d), t.validate(dataloaders=d)),  # type: ignore[call-arg]
    "predict after fit": lambda t, m, d: (t.fit(m, d), t.predict(dataloaders=d, return_predictions=True)),  # type: ignore[call-arg]
}


def _trainer(**options: Any) -> Trainer:
    limits = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1, "limit_test_batches": 1}
    return Trainer(**{**limits, "enable_progress_bar": False, **options})


@pytest.mark.parametrize("name", CALLS)
def test_a_call_with_lightnings_names_does_what_it_does_there(name: str) -> None:
    trainer = _trainer()
    CALLS[name](trainer, BoringModel(), DataLoader(RandomDataset(32, 8)))
    assert trainer.global_step == (2 if "fit" in name else 0)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda t, m, d: t.fit(m, data=d, datamodule=d),
            TypeError,
            "data=..., datamodule=...): both mean the same: give one",
        ),
        (lambda t, m, d: t.fit(m, d, ckpt_path="last"), TypeError, "repeating the same run resumes it: pass run"),
        (lambda t, m, d: t.test(dataloaders=d), UserError, "test was given no module, and there is none"),
        (lambda t, m, d: t.fit(train_dataloaders=d), TypeError, "missing a required argument: 'module'"),
    ],
)
def test_a_call_that_cannot_be_understood_says_why(call: Call, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        call(_trainer(), BoringModel(), DataLoader(RandomDataset(32, 8)))
    assert words in str(caught.value)


def test_arguments_that_ask_for_nothing_are_taken() -> None:
    neutral = {"logger": False, "num_sanity_val_steps": 0, "enable_model_summary": False, "log_every_n_steps": 5}
    neutral |= {"fast_dev_run": False, "detect_anomaly": False, "inference_mode": True, "profiler": None}
    assert _trainer(**neutral, enable_checkpointing=True).settings.snapshots is not None
    assert _trainer(enable_checkpointing=False).settings.snapshots is None
    for name, value in {"logger": object(), "profiler": "simple", "max_time": "8h"}.items():
        with pytest.raises(JobError, match=name):
            _trainer(**{name: value})


class Net(L.LightningModule):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(8, classes)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        # the first epoch is the best one
        self.log("val_loss", float(self.current_epoch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


DATA = TensorDataset(torch.randn(16, 8, generator=torch.Generator().manual_seed(0)))


def test_the_path_of_the_best_weights_is_a_checkpoint(tmp_path: Path) -> None:
    best, net, loader = ModelCheckpoint(monitor="val_loss"), Net(4), DataLoader(DATA, 8)
    trainer = Trainer(max_epochs=2, seed=7, callbacks=[best], enable_progress_bar=False)
    trainer.fit(net, loader, DataLoader(DATA, 8), run=tmp_path / "run")
    last = {name: value.clone() for name, value in net.state_dict().items()}
    loaded = Net.load_from_checkpoint(best.best_model_path)
    assert loaded.hparams["classes"] == 4
    saved = torch.load(best.best_model_path, weights_only=True)
    assert (saved["epoch"], saved["global_step"]) == (0, 2)
    trainer.validate(dataloaders=loader)  # type: ignore[call-arg]
    for name, value in net.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name])
        assert torch.equal(value, saved["state_dict"][name])
        assert not torch.equal(value, last[name])


class Still(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_a_new_run_starts_from_a_checkpoint_of_lightning(tmp_path: Path) -> None:
    """A run that has snapshots goes on with its own weights."""
    trained, loader = Net(3), DataLoader(DATA, 8)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    theirs = L.Trainer(max_epochs=1, accelerator="cpu", **quiet)
    theirs.fit(trained, loader)
    theirs.save_checkpoint(tmp_path / "trained.ckpt")
    expected = trained.net.weight.detach().clone()
    theirs.fit(trained, loader)
    theirs.save_checkpoint(tmp_path / "other.ckpt")
    for ckpt_path in (tmp_path / "trained.ckpt", tmp_path / "other.ckpt", "last"):
        module = Still(3)
        Trainer(max_epochs=1, enable_progress_bar=False).fit(module, loader, run=tmp_path / "run", ckpt_path=ckpt_path)
        assert torch.equal(module.net.weight, expected)


def test_a_trained_module_can_be_given_to_lightnings_trainer() -> None:
    module, data = BoringModel(), BoringDataModule()
    _trainer().fit(module, data)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    theirs = L.Trainer(max_epochs=1, limit_train_batches=2, limit_val_batches=1, accelerator="cpu", **quiet)
    theirs.fit(module, data)
    assert (theirs.global_step, type(module)) == (2, BoringModel)
    trainer = _trainer()
    trainer.fit(module, data)
    assert trainer.global_step == 2
