"""What a module finds under a name of its Trainer, beside what it finds there in Lightning."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from midstride.engine import Trainer
from midstride.engine.errors import UserError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning as L
    from laws.lightning import style

pytestmark = pytest.mark.filterwarnings("ignore")


class Looking(style.AutoEncoder):
    """Notes what `look` finds in its steps and as epochs end."""

    def __init__(self, look: Callable[[Any], Any]) -> None:
        torch.manual_seed(7)
        super().__init__()
        self.look, self.found = look, list[Any]()

    def note(self, *_: Any) -> None:
        self.found.append(self.look(self))

    on_validation_end = on_train_epoch_end = on_train_batch_end = note

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss: Tensor = super().training_step(batch, batch_idx)
        self.log("shown", loss, prog_bar=True)
        self.log("both", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.note()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0]
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log_dict({"val": loss, "val other": loss * 2}, prog_bar=True)
        self.log("val aside", loss)
        self.note()


class Endless(IterableDataset[Any]):
    """Two batches; that there are no more, only reading tells."""

    def __iter__(self) -> Iterator[Any]:
        yield from style.tensors(8)


#: what is looked at, and the options of both Trainers
CASES: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "names in the progress bar": (lambda m: sorted(m.trainer.progress_bar_metrics), {}),
    "kinds of values there": (lambda m: {type(v) for v in m.trainer.progress_bar_metrics.values()}, {}),
    "batches of a validation": (lambda m: m.trainer.num_val_batches, {}),
    "a limited validation": (lambda m: m.trainer.num_val_batches, {"limit_val_batches": 1}),
    "epochs at least": (lambda m: m.trainer.min_epochs, {}),
    "the epochs that were asked for": (lambda m: m.trainer.min_epochs, {"min_epochs": 1}),
    "a running call": (lambda m: (m.trainer.state.status == "running", m.trainer.state.finished), {}),
    "a folder of its own": (lambda m: m.trainer.default_root_dir, {"default_root_dir": "~/of lightning"}),
    **{f"the name of {one!r}": (lambda m: m.trainer.precision, {"precision": one}) for one in (32, "bf16-mixed", "64")},
}


def _beside(look: Callable[[Any], Any], options: dict[str, Any]) -> list[Any]:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    theirs = L.Trainer(max_epochs=2, accelerator="cpu", num_sanity_val_steps=0, **quiet, **options)
    modules = [Looking(look), Looking(look)]
    for trainer, module in zip((theirs, Trainer(max_epochs=2, **options)), modules, strict=True):
        trainer.fit(module, style.loader(8), DataLoader(Endless(), batch_size=4))  # type: ignore[attr-defined]
    return [module.found for module in modules]


@pytest.mark.parametrize("case", CASES)
def test_a_name_of_the_trainer_is_as_in_lightning(case: str) -> None:
    theirs, ours = _beside(*CASES[case])
    assert ours == theirs


def test_in_64_bits_new_tensors_of_a_step_have_64_bits() -> None:
    def look(module: Any) -> Any:
        return torch.zeros(1).dtype if torch.get_default_dtype() == torch.float64 else None

    theirs, ours = _beside(look, {"precision": "64-true"})
    assert ours == theirs
    assert torch.float64 in ours
    assert torch.get_default_dtype() == torch.float32


class Iterating(style.AutoEncoder):
    def training_step(self, dataloader_iter: Any) -> Any:
        return super().training_step(next(dataloader_iter), 0)


def test_a_step_that_takes_the_iterator_of_the_loader_is_refused() -> None:
    with pytest.raises(UserError, match=r"Iterating.training_step takes dataloader_iter, .* batch, batch_idx"):
        Trainer(max_epochs=1).fit(Iterating(), style.loader(8))  # type: ignore[arg-type]


class Evaluated(style.AutoEncoder):
    """Notes the loaders of its evaluations, and fails in a test if told to."""

    fails, found = False, ()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.found = (*self.found, self.trainer.test_dataloaders)
        if self.fails:
            raise RuntimeError("told to")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.found = (*self.found, self.trainer.predict_dataloaders)
        return batch


@pytest.mark.parametrize("kind", [L.Trainer, Trainer])
def test_a_call_has_its_loaders_and_leaves_a_state(kind: Any) -> None:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer, module, loader = kind(accelerator="cpu", **quiet), Evaluated(), style.loader(8)  # type: ignore[no-untyped-call]
    assert not trainer.state.finished
    trainer.test(module, loader)
    assert trainer.state.finished
    assert trainer.state.status == "finished"
    assert len(trainer.predict(module, loader)) == 2
    assert not trainer.predict(module, loader, return_predictions=False)
    assert [one.dataset for one in module.found] == [loader.dataset] * 6
    module.fails = True
    with pytest.raises(RuntimeError, match="told to"):
        trainer.test(module, loader)
    assert (trainer.state.status, trainer.state.finished, trainer.state.stopped) == ("interrupted", False, True)
