"""What the built-in callbacks make of the values that they are given, and how several are told apart."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nets import Net
from support.snapshot_writers import save_weights
from torch import Tensor
from torch.utils.data import DataLoader

from midstride.engine import BestCheckpoint, Callback, EarlyStopping, Trainer
from midstride.engine.errors import UserError
from midstride.engine.loggers.base import CommittedRows, LoggedRun, Logger, Row
from midstride.engine.loggers.delivery import Delivery
from midstride.engine.modules.callback_states import Callbacks
from midstride.engine.snapshots.weights import best_of, folder_to_test
from midstride.engine.storage.store import Store
from midstride.engine.testing import assert_resumes_exactly

NAN, HOST = math.nan, torch.device("cpu")


class Logs(Net):
    """Takes one step an epoch, and logs the next of some values: in the validation after it, the step or the epoch."""

    def __init__(self, values: list[float], where: str = "validation") -> None:
        super().__init__()
        self.values, self.where = values, where

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.where in ("step", "mean"):
            self.log("value", self.values[self.current_epoch], on_epoch=self.where == "mean")
        return self.layer(batch.float().unsqueeze(1)).mean()

    def on_train_epoch_end(self) -> None:
        if self.where == "epoch end":
            self.log("value", self.values[self.current_epoch])

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("value", self.values[self.current_epoch])


def fit(values: list[float], *callbacks: Callback, where: str = "validation") -> Trainer:
    trainer = Trainer(max_epochs=len(values), callbacks=list(callbacks))
    data = DataLoader([1, 2], batch_size=2), DataLoader([3]) if where == "validation" else None
    trainer.fit(Logs(values, where), *data)
    return trainer


def stop(patience: int = 3, **options: Any) -> EarlyStopping:
    return EarlyStopping("value", patience=patience, **options)


#: callback, the value of each check, steps after which the fit ends, the best value, why it ends
STOPS: dict[str, tuple[EarlyStopping, list[float], int, float, str]] = {
    "it gets better": (stop(1), [3, 2, 1], 3, 1, "max_epochs 3 reached"),
    "it stays": (stop(2), [3, 2, 2, 2, 1], 4, 2, "has not improved for 2 checks, best 2 at epoch 1"),
    "it should grow": (stop(1, mode="max"), [1, 2, 1, 3], 3, 2, "has not improved for 1 check, best 2 at epoch 1"),
    "too small": (stop(1, min_delta=0.5), [3, 2.75, 1], 2, 3, "has not improved by 0.5 for 1 check, best 3 at epoch 0"),
    "just so": (stop(1, min_delta=0.5), [3, 2.5, 1], 2, 3, "has not improved by 0.5 for 1 check, best 3 at epoch 0"),
    "not a number": (stop(2), [NAN, NAN, 1], 2, math.inf, "has not improved for 2 checks"),
    "good enough": (stop(stopping_threshold=2.0), [3, 2, 1, 0], 3, 2, "is 1, past stopping_threshold 2"),
    "large": (stop(mode="max", stopping_threshold=2.0), [1, 2, 3, 4], 3, 2, "is 3, past stopping_threshold 2"),
    "far too bad": (stop(9, divergence_threshold=5.0), [3, 5, 6, 1], 3, 3, "is 6, past divergence_threshold 5"),
    "not logged": (EarlyStopping("other", strict=False), [3, 2, 1], 3, math.inf, "max_epochs 3 reached"),
    "patience begins anew": (stop(2), [3, 4, 2, 4, 4, 1], 5, 2, "has not improved for 2 checks, best 2 at epoch 2"),
}

#: where the value is logged: what is logged in training is looked at where there is no validation
PLACES = ("validation", "step", "mean", "epoch end")


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("case", STOPS)
def test_training_stops_where_nothing_gets_better(case: str, where: str) -> None:
    callback, values, steps, best, why = STOPS[case]
    progress = fit(values, callback, where=where).progress
    assert (progress.step, callback.best) == (steps, best)
    if not why.startswith("max_epochs"):
        why = f"early stopping: value {why.replace('check', 'validation' if where == 'validation' else 'epoch')}"
    assert progress.why == why


#: mode, the value of each validation, the step of the best
BESTS: dict[str, tuple[str, list[float], int]] = {
    "in the middle": ("min", [3, 1, 2], 2),
    "the first of equals": ("min", [1, 1, 1], 1),
    "larger is better": ("max", [1, 3, 3], 2),
    "after what is no number": ("min", [NAN, 5, NAN], 2),
    "none at all": ("max", [NAN, NAN], -1),
}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("case", BESTS)
def test_the_best_weights_are_those_of_the_best_value(case: str, where: str) -> None:
    mode, values, step = BESTS[case]
    best = BestCheckpoint("value", mode)
    fit(values, best, where=where)
    assert best.best_step == step


@pytest.mark.parametrize("kind", [BestCheckpoint, EarlyStopping])
def test_what_is_not_logged_cannot_be_monitored(kind: type[Callback]) -> None:
    with pytest.raises(UserError, match=r"monitors 'val/loss', which was not logged; logged so far: value\. "):
        fit([1.0], kind("val/loss"))  # type: ignore[call-arg]
    with pytest.raises(UserError, match="mode should be min or max, not 'low'"):
        kind("value", mode="low")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "arguments", [{"patience": True}, {"patience": -1}, {"patience": 2.0}, {"min_delta": "0.1"}, {"min_delta": NAN}]
)
def test_early_stopping_takes_no_other_numbers(arguments: dict[str, Any]) -> None:
    ((name, value),) = arguments.items()
    with pytest.raises(UserError, match=rf"EarlyStopping: {name} should be a \w+ number( from 0 on)?, not {value!r}"):
        EarlyStopping("value", **arguments)


def test_callbacks_of_one_class_have_states_of_their_own() -> None:
    def three() -> list[Callback]:
        return [EarlyStopping("a"), BestCheckpoint("a"), EarlyStopping("b")]

    first, again = three(), three()
    for number, callback in enumerate(first):
        callback.best = float(number)  # type: ignore[attr-defined]
    Callbacks(again, HOST).load_state_dict(Callbacks(first, HOST).state_dict())
    assert list(Callbacks(first, HOST).by_name) == ["EarlyStopping", "BestCheckpoint", "EarlyStopping#1"]
    assert [callback.best for callback in again] == [0.0, 1.0, 2.0]  # type: ignore[attr-defined]


def test_new_callbacks_start_afresh_and_gone_ones_are_forgotten() -> None:
    saved = Callbacks([EarlyStopping("a")], HOST).state_dict()
    running = Callbacks([BestCheckpoint("a")], HOST)
    running.load_state_dict(saved)
    fresh = {"best": math.inf, "best_step": -1, "monitor": "a", "mode": "min"}
    assert saved == running.state_dict() == {"BestCheckpoint": fresh}


@pytest.mark.parametrize("kind", [BestCheckpoint, EarlyStopping])
@pytest.mark.parametrize(
    ("monitor", "mode", "best"), [("a", "max", 0.5), ("a", "min", math.inf), ("b", "max", -math.inf)]
)
def test_the_best_of_another_value_says_nothing(
    kind: Any, monitor: str, mode: str, best: float, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = kind("a", mode="max"), kind(monitor, mode=mode)
    before.best = 0.5
    running = Callbacks([after], HOST)
    saved = Callbacks([before], HOST).state_dict()
    running.load_state_dict(saved)
    assert after.best == best
    assert saved == running.state_dict()
    told = f"{kind.__name__} now watches {monitor} ({mode}), but the snapshot has the best a (max)"
    assert caplog.messages == ([] if best == 0.5 else [f"{told}: the search starts over"])


class Tracker(Logger):
    """Keeps whether it was given best weights."""

    got_best: bool | None = None

    def open(self, run: LoggedRun, rows: CommittedRows) -> int:
        return 0

    def log_rows(self, rows: Sequence[Row]) -> None:
        pass

    def finish(self, best: Path | None) -> None:
        self.got_best = best is not None and best.stat().st_size > 0


#: what the last of three epochs is trained with, after two with BestCheckpoint("value") -> what is tested at the end
RESUMED_WITH: dict[str, tuple[list[Callback], float, str]] = {
    "the same": ([BestCheckpoint("value")], NAN, "best"),
    "another callback beside it": ([BestCheckpoint("value"), EarlyStopping("value", mode="max")], NAN, "best"),
    "another mode beside it, without a value": ([BestCheckpoint("value"), BestCheckpoint("value", "max")], NAN, "best"),
    "none": ([], 9, "last"),
    "another mode, with a better value": ([BestCheckpoint("value", "max")], 9, "best"),
    "another mode, without one": ([BestCheckpoint("value", "max")], NAN, "last"),
}


@pytest.mark.parametrize("case", RESUMED_WITH)
def test_best_weights_of_another_monitor_are_not_tested_or_sent(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callbacks, value, folder = RESUMED_WITH[case]
    given: list[tuple[int, list[Callback]]] = [(2, [BestCheckpoint("value")]), (3, callbacks)]
    for epochs, with_these in given:
        trainer = Trainer(max_epochs=epochs, callbacks=with_these, enable_progress_bar=False)
        data = DataLoader([1, 2], batch_size=2), DataLoader([3])
        trainer.fit(Logs([3, 2, value]), *data, run=str(tmp_path / "run"))
    caplog.clear()
    store = Store.open(tmp_path / "run")
    tracker = Tracker()
    Delivery(store, tracker).finish()
    assert tracker.got_best == (folder == "best")
    assert caplog.messages == []
    assert folder_to_test(store) == folder
    assert any("was called best by value (min), and the run ended with" in line for line in caplog.messages) == (
        folder == "last"
    )
    assert bool(best_of(store, "value", "min")) == (value != 9 or not callbacks)
    assert bool(best_of(store, "value", "max")) == (folder == "best" and value == 9)


@pytest.mark.parametrize("folder", ["best", "last"])
def test_best_weights_of_an_unnamed_monitor_are_tested(folder: str, tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    for name in ("best", "last"):
        watched = {"monitors": [{"monitor": name, "mode": "min"}]} if name != folder else {}
        save_weights(store, name, {"w": torch.ones(1)}, watched)
    assert folder_to_test(store) == "best"


class AtEpochEnd(Logs):
    """Logs a value of the epoch's own, beside those of its validations."""

    def on_train_epoch_end(self) -> None:
        self.log("own", self.values[self.current_epoch])


#: when it looks, the options of the Trainer -> the steps after which values were looked at; two steps make an epoch
LOOKS: list[tuple[bool | None, dict[str, Any], list[int]]] = [
    (None, {}, [2, 4]),
    (True, {}, [2, 4]),
    (False, {}, [2, 4]),
    (None, {"val_check_interval": 1}, [1, 2, 3, 4]),
    (True, {"val_check_interval": 1}, [2, 4]),
    (None, {"check_val_every_n_epoch": 2}, [4]),
    (True, {"check_val_every_n_epoch": 2}, [2, 4]),
    (None, {"limit_val_batches": 0, "val_check_interval": 1}, [2, 4]),
    (True, {"limit_val_batches": 0}, [2, 4]),
    (False, {"limit_val_batches": 0}, []),
]


@pytest.mark.parametrize(("at_end", "options", "steps"), LOOKS)
def test_a_monitor_looks_after_validations_or_as_epochs_end(
    at_end: bool | None, options: dict[str, Any], steps: list[int]
) -> None:
    looked: list[int] = []

    class Noting(EarlyStopping):
        def judge(self, trainer: Any) -> None:
            looked.append(trainer.global_step)

    watched = Noting("own" if "limit_val_batches" in options else "value", check_on_train_epoch_end=at_end)
    trainer = Trainer(max_epochs=2, callbacks=watched, enable_progress_bar=False, **options)
    trainer.fit(AtEpochEnd([2.0, 1.0]), DataLoader([1, 2]), DataLoader([3]))
    assert looked == steps


def test_a_value_of_the_epoch_is_monitored_beside_a_validation() -> None:
    best = BestCheckpoint("own")
    trainer = Trainer(max_epochs=3, callbacks=best, enable_progress_bar=False)
    trainer.fit(AtEpochEnd([2.0, 1.0, 3.0]), DataLoader([1, 2], 2), DataLoader([3]))
    assert (best.best, best.best_step) == (1.0, 2)


@pytest.mark.parametrize("where", ["step", "mean"])
def test_what_saw_epochs_without_a_validation_resumes_exactly(where: str) -> None:
    callbacks = [BestCheckpoint("value"), EarlyStopping("value", patience=9)]
    assert_resumes_exactly(partial(Logs, [2.0, 1.0, 3.0], where), DataLoader([1, 2, 3]), callbacks=callbacks, steps=9)


def test_values_of_skipped_validations_are_not_monitored(tmp_path: Path) -> None:
    stopping, resumed = EarlyStopping("value", patience=1), EarlyStopping("value", patience=1)
    options: dict[str, Any] = {"snapshots": {"every_steps": 1}, "accept_change": ["limit_val_batches"]}
    data = DataLoader([1, 2], batch_size=2), DataLoader([3])
    Trainer(max_epochs=2, callbacks=stopping, **options).fit(Logs([2, 1]), *data, run=tmp_path / "run")
    trainer = Trainer(max_epochs=5, callbacks=resumed, limit_val_batches=0, **options)
    trainer.fit(Logs([2, 1]), *data, run=tmp_path / "run")
    assert (trainer.progress.step, resumed.best, resumed.wait_count) == (5, 1, 0)


def test_a_callback_that_another_trainer_had_begins_anew() -> None:
    """Folds and grids are often given the same ones."""
    stopping, best = EarlyStopping("value", patience=1), BestCheckpoint("value")
    assert fit([3, 1, 2], stopping, best).progress.step == 3
    assert fit([9, 8, 7, 8], stopping, best).progress.step == 4
    assert (stopping.best, best.best) == (7, 7)


def test_a_callback_that_is_set_before_its_first_fit_begins_so() -> None:
    stopping = EarlyStopping("value", patience=1)
    Trainer(callbacks=stopping)
    stopping.load_state_dict({**stopping.state_dict(), "best": 2.0})
    assert fit([3, 1], stopping).progress.step == 1


@pytest.mark.parametrize(
    ("options", "steps"),
    [({"max_epochs": -1}, 1), ({"max_epochs": -1, "min_steps": 7}, 7), ({"max_epochs": 3, "min_steps": 5}, 5)],
    ids=str,
)
def test_a_fit_that_is_stopped_ends_at_the_least_number_of_steps(options: dict[str, Any], steps: int) -> None:
    class Stops(Callback):
        def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
            if trainer.global_step == 1:
                trainer.stop()

    trainer = Trainer(**options, callbacks=Stops(), enable_progress_bar=False)
    trainer.fit(Logs([1.0] * 9, "step"), DataLoader([1, 2]))
    assert (trainer.global_step, trainer.progress.ended_by) == (steps, "callback")
