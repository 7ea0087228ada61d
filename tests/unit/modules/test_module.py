"""What a TrainingModule keeps of the arguments it was made with, and what a copy of one is."""

import copy
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import nets
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import DataModule, Trainer, TrainingModule
from midstride.engine.errors import SnapshotDamaged, SnapshotError, UserError
from midstride.engine.modules.hyperparameters import accepted_arguments


class Net(TrainingModule):
    """Has every kind of argument."""

    def __init__(self, mode: str, *sizes: int, rate: float = 0.1, keep: Any = {}, **others: Any) -> None:  # noqa: B006
        super().__init__()
        self.save_hyperparameters(*keep.get("names", ()), ignore=keep.get("ignore", ()))


class Wide(Net):
    """Has an argument more."""

    def __init__(self, mode: str, width: int = 2) -> None:
        super().__init__(mode, keep={"ignore": "keep"})


class Doubled(Net):
    """Gives its base another value than it was given itself."""

    def __init__(self, mode: str, rate: float = 0.1) -> None:
        super().__init__(mode, rate=2 * rate, keep={"ignore": "keep"})


class Numbers(DataModule):
    """Data that keep their arguments."""

    def __init__(self, count: int, part: Net | None = None) -> None:
        part = part or Net("b", keep={"ignore": "keep"})
        self.save_hyperparameters()


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ({"ignore": "keep"}, {"mode": "a", "rate": 0.1, "model": "b"}),
        ({"ignore": ("keep", "model")}, {"mode": "a", "rate": 0.1}),
        ({"names": ("rate", "model")}, {"rate": 0.1, "model": "b"}),
        ({"names": ("rate", "model"), "ignore": "model"}, {"rate": 0.1}),
    ],
)
def test_the_arguments_that_are_named_are_kept(keep: dict[str, Any], kept: dict[str, Any]) -> None:
    assert Net("a", 3, keep=keep, model="b").hparams == kept


def test_a_name_that_is_no_argument_is_refused() -> None:
    said = "save_hyperparameters: 'ratte' is not an argument here: choose from mode, rate, keep"
    with pytest.raises(UserError, match=re.escape(said)):
        Net("a", keep={"names": ("ratte",)})


def test_a_derived_class_keeps_the_arguments_of_both() -> None:
    assert Wide("a", 4).hparams == {"mode": "a", "width": 4, "rate": 0.1}
    assert Doubled("a").hparams == {"mode": "a", "rate": 0.1}


def test_a_constructor_gets_its_arguments_kept_by_its_base() -> None:
    kept = {"mode": "a", "width": 4, "rate": 0.1}
    assert accepted_arguments(Wide, kept) == {"mode": "a", "width": 4}
    assert accepted_arguments(Net, kept) == kept


def test_data_and_parts_made_in_a_constructor_keep_their_own() -> None:
    numbers = Numbers(3)
    assert numbers.hparams == {"count": 3, "part": numbers.hparams.part}
    assert numbers.hparams.part.hparams == {"mode": "b", "rate": 0.1}


def test_a_hyperparameter_is_an_attribute_too() -> None:
    hparams = Net("a").hparams
    hparams.rate = 0.2
    assert hparams["rate"] == hparams.rate == 0.2
    del hparams.rate
    with pytest.raises(AttributeError, match="unknown hyperparameter 'rate': choose one of mode"):
        _ = hparams.rate
    assert copy.deepcopy(hparams) == pickle.loads(pickle.dumps(hparams)) == hparams


def test_arguments_are_kept_in_a_constructor_alone() -> None:
    with pytest.raises(RuntimeError, match="must be called in the __init__ of Net"):
        Net("a").save_hyperparameters()


class Line(nets.Net):
    inputs = 2


def through_a_file(module: TrainingModule) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file])
def test_a_fitted_module_is_copied_and_saved_without_its_trainer(
    copied: Callable[[TrainingModule], Any], tmp_path: Path
) -> None:
    module, trainer = Line(), Trainer(max_epochs=1)
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(4, 2)), 2), run=tmp_path / "run")
    other = copied(module)
    assert torch.equal(other.layer.weight, module.layer.weight)
    assert module.trainer is trainer
    with pytest.raises(RuntimeError, match="Line has no Trainer"):
        _ = other.trainer


class Sized(Line):
    """Is made with an argument."""

    def __init__(self, rate: float, note: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


class Banded(Line):
    """Is made with an argument that `Sized` has not."""

    def __init__(self, bands: int) -> None:
        super().__init__()


def test_a_file_that_was_saved_is_loaded_by_its_path(tmp_path: Path) -> None:
    module, trainer, file = Sized(0.5), Trainer(max_epochs=1), tmp_path / "new" / "weights.ckpt"
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(4, 2)), 2), run=tmp_path / "run")
    trainer.save_checkpoint(file)
    for path in (file, str(file), tmp_path / "run" / "last"):
        loaded = Sized.load_from_checkpoint(path)
        assert loaded.hparams == {"rate": 0.5, "note": None}
        assert torch.equal(loaded.layer.weight, module.layer.weight)
    with pytest.raises(
        UserError, match=r"Banded takes other arguments than those saved in .* or passed \(none\): .* 'bands'"
    ):
        Banded.load_from_checkpoint(file)


def test_weights_of_safetensors_are_loaded_by_their_path(tmp_path: Path) -> None:
    module, file = Sized(0.5), tmp_path / "weights.safetensors"
    save_file(module.state_dict(), file)
    assert torch.equal(Sized.load_from_checkpoint(file, rate=0.5).layer.weight, module.layer.weight)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SnapshotDamaged, match=f"{file} is not in the format"):
        Sized.load_from_checkpoint(file, rate=0.5)


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        (None, "no weights were saved in"),
        (b"0", "is damaged, or holds more than tensors and plain values"),
        ({"state_dict": {}, "hyper_parameters": {"note": Line}}, r"load the weights yourself: .*weights_only=False"),
        (Line().state_dict(), "has no state_dict: use a file that trainer.save_checkpoint or midstride export wrote"),
    ],
)
def test_what_is_no_checkpoint_is_named(tmp_path: Path, saved: Any, said: str) -> None:
    path = tmp_path / "weights.ckpt"
    if isinstance(saved, bytes):
        path.write_bytes(saved)
    elif saved is not None:
        torch.save(saved, path)
    with pytest.raises(SnapshotError, match=said) as caught:
        Sized.load_from_checkpoint(path)
    assert str(path) in str(caught.value)


def test_a_step_without_a_trainer_logs_to_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Tried(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", 1.0)
            self.log_dict({"loss": 1.0})
            return batch

    assert [Tried().training_step(batch, 0) for batch in "ab"] == ["a", "b"]
    assert caplog.messages == ["Tried has no Trainer: values passed to self.log are dropped"]


def test_a_frozen_module_has_no_gradients_and_is_in_eval_mode() -> None:
    module = Line()
    module.freeze()
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert not any(layer.training for layer in module.modules())
    module.unfreeze()
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert all(layer.training for layer in module.modules())
