"""Evaluations outside a fit: what they read, and what hooks see in them."""

import copy
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nets import Net
from torch import Tensor
from torch.nn.functional import dropout
from torch.utils.data import DataLoader

from midstride.engine import Callback, Trainer, TrainerInterface, TrainingModule
from midstride.engine.errors import UserError


class Doubling(Net):
    """Trains a weight; what is evaluated is the batch alone."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step([batch[:, None]], batch_idx)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test/rows", float(len(batch)), reduce_fx="sum")

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return 2 * batch


def rows() -> DataLoader[Any]:
    return DataLoader(torch.arange(6.0), 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("evaluate", ["test", "predict"])
def test_an_evaluation_stands_where_the_fit_before_it_ended(evaluate: str) -> None:
    class Standing(Doubling):
        def on_test_start(self, *_: Any) -> None:
            self._seen.append((self.current_epoch, self.global_step))

        on_test_batch_end = on_predict_start = on_predict_batch_end = on_test_start

    module, trainer = Standing(), Trainer(max_epochs=2, enable_progress_bar=False)
    trainer.fit(module, rows())
    getattr(trainer, evaluate)(module, rows())
    assert set(module._seen) == {(2, 6)}
    assert (trainer.current_epoch, trainer.global_step) == (2, 6)


def test_limits_of_a_test_do_not_limit_predictions() -> None:
    trainer = Trainer(limit_test_batches=1, enable_progress_bar=False)
    assert trainer.test(Doubling(), rows()) == {"test/rows": 2.0}
    assert torch.cat(trainer.predict(Doubling(), rows())).tolist() == [0, 2, 4, 6, 8, 10]


def test_hooks_of_a_prediction_get_its_lanes_once_a_batch() -> None:
    class Hooked(Doubling):
        def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self._seen.append({lane: len(samples) for lane, samples in batch.items()})

        def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            assert all(torch.equal(outputs[lane], 2 * samples) for lane, samples in batch.items())

    module, trainer = Hooked(), Trainer(lanes=2, enable_progress_bar=False)
    predicted = torch.cat(trainer.predict(module, rows()))
    assert sorted(predicted.tolist()) == [0, 2, 4, 6, 8, 10]
    assert module._seen == [{0: 1, 1: 1}] * 3 or module._seen == [{0: 2, 1: 2}, {0: 1, 1: 1}]


@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize("verb", ["test", "predict"])
def test_a_batch_is_moved_once_and_that_of_each_lane_by_itself(verb: str, lanes: int | None) -> None:
    class Moving(Doubling):
        def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
            self._seen += batch.tolist()
            return batch + 100

        def test_step(self, batch: Tensor, batch_idx: int) -> None:
            assert all(100 <= value < 200 for value in batch.tolist())

        def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
            self.test_step(batch, batch_idx)
            return batch

    module = Moving()
    getattr(Trainer(lanes=lanes, enable_progress_bar=False), verb)(module, rows())
    assert sorted(module._seen) == [0, 1, 2, 3, 4, 5]


def test_a_prediction_without_data_is_refused() -> None:
    with pytest.raises(UserError, match="no predict loader: define predict_dataloader"):
        Trainer(enable_progress_bar=False).predict(Doubling())


def _step_of_one(self: Any, batch: Tensor, batch_idx: int) -> None:
    pass


def _step_of_any(self: Any, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
    pass


def _step_of_several(self: Any, batch: Tensor, batch_idx: int, dataloader_idx: int) -> None:
    pass


def _end_of_one(self: Any, outputs: Any, batch: Tensor, batch_idx: int) -> None:
    pass


#: a method, its name, the loaders that are validated on, and what is said
UNTOLD: list[tuple[Callable[..., None], str, int, str]] = [
    (_step_of_one, "validation_step", 2, "there are 2 validate loaders, and {} takes no dataloader_idx"),
    (_step_of_one, "on_validation_batch_start", 3, "there are 3 validate loaders, and {} takes no dataloader_idx"),
    (_end_of_one, "on_validation_batch_end", 2, "there are 2 validate loaders, and {} takes no dataloader_idx"),
    (_step_of_several, "validation_step", 1, "there is one validate loader, and {} requires further arguments"),
]


@pytest.mark.parametrize(("method", "name", "loaders", "said"), UNTOLD)
@pytest.mark.parametrize("fitting", [True, False])
def test_a_method_that_is_not_told_the_loader_is_refused_by_name(
    method: Callable[..., None], name: str, loaders: int, said: str, fitting: bool
) -> None:
    module = type("Untold", (Doubling,), {"validation_step": _step_of_any, name: method})()
    validated = [rows() for _ in range(loaders)]
    trainer = Trainer(max_epochs=1, enable_progress_bar=False)
    call = partial(trainer.fit, module, rows(), validated) if fitting else partial(trainer.validate, module, validated)
    with pytest.raises(UserError, match=re.escape(said.format(f"Untold.{name}")) + ".*write dataloader_idx=0"):
        call()
    assert trainer.global_step == 0


class InTheFit(Callback):
    """Calls a Trainer at the end of each epoch of a fit."""

    def __init__(self, call: Callable[[TrainerInterface, Any], object]) -> None:
        self._call = call

    def on_train_epoch_end(self, trainer: TrainerInterface, module: TrainingModule) -> None:
        self._call(trainer, module)


class Dropping(Doubling):
    """Draws in training, logs, and holds a module that could be tested alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Doubling()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(dropout(batch), batch_idx)
        self.log("loss", loss)
        return loss


def quiet(**options: Any) -> Trainer:
    return Trainer(enable_progress_bar=False, **options)


@pytest.mark.parametrize(
    ("call", "same"),
    [
        (lambda trainer, module: trainer.test(module, rows()), "Trainer"),
        (lambda trainer, module: trainer.predict(Doubling(), rows()), "Trainer"),
        (lambda trainer, module: trainer.fit(Doubling(), rows()), "Trainer"),
        (lambda trainer, module: quiet().validate(module, rows()), "Dropping"),
        (lambda trainer, module: quiet().test(module.inner, rows()), "Doubling"),
    ],
)
def test_a_call_with_the_trainer_or_module_of_a_fit_is_refused(call: Any, same: str) -> None:
    with pytest.raises(UserError, match=f"is called inside trainer.fit of the same {same}, which it would change"):
        quiet(max_epochs=1, callbacks=[InTheFit(call)]).fit(Dropping(), rows())


def test_a_call_inside_an_evaluation_is_refused_too() -> None:
    class Nesting(Doubling):
        def on_test_start(self) -> None:
            self.trainer.predict(Doubling(), rows())  # type: ignore[attr-defined]

    with pytest.raises(UserError, match=r"trainer.predict is called inside trainer.test of the same Trainer"):
        quiet().test(Nesting(), rows())


def test_another_trainer_evaluates_a_copy_inside_a_fit(tmp_path: Path) -> None:
    def logged(name: str, *callbacks: Callback) -> str:
        trainer = quiet(max_epochs=3, callbacks=callbacks)
        trainer.fit(Dropping(), rows(), run=tmp_path / name)
        return (tmp_path / name / "metrics.csv").read_text()

    seen: list[Any] = []
    evaluates = InTheFit(lambda _, module: seen.append(quiet(seed=7).test(copy.deepcopy(module), rows())))
    assert logged("evaluated", evaluates) == logged("alone")
    assert seen == [{"test/rows": 6.0}] * 3


class Leaving(Callback):
    """Changes the current folder at the end of training."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: TrainerInterface, module: TrainingModule) -> None:
        os.chdir(self.folder)


def test_weights_of_the_run_are_found_from_another_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    trainer = Trainer(max_epochs=1, callbacks=[Leaving(tmp_path / "elsewhere")], enable_progress_bar=False)
    trainer.fit(Doubling(), rows(), run="a")
    assert trainer.run_url == str(tmp_path / "a")
    assert trainer.test(Doubling(), rows(), ckpt_path="last")["test/rows"] == 6


def test_weights_of_other_arguments_are_refused_with_both(tmp_path: Path) -> None:
    class Wide(Doubling):
        def __init__(self, width: int = 1, depth: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.wide = torch.nn.Linear(width, 1)

    trainer = Trainer(max_steps=1, enable_progress_bar=False)
    trainer.fit(Wide(2), rows(), run=str(tmp_path / "run"))
    words = r"do not fit Wide: width is 2 there, 3 here\..* --set module_args\.width=2\n.*(.|\n)*size mismatch for wide"
    with pytest.raises(UserError, match=words):
        trainer.test(Wide(3), rows(), ckpt_path="last")
    with pytest.raises(UserError, match=r"do not fit Doubling: Error\(s\) in loading state_dict"):
        trainer.test(Doubling(), rows(), ckpt_path="last")
