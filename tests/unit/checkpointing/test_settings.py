"""What another life asks for, and what its snapshot brings along: each setting that does not take effect is named."""

import dataclasses
import enum
import json
import logging
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from support.libraries import library
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import BestCheckpoint, Callback, Trainer, TrainingModule
from midstride.engine.checkpointing.identity import identity_changes
from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import IdentityChanged, JobError, UserCodeError, UserError
from midstride.engine.runs.report_text import markdown_of
from midstride.engine.runs.run import Run
from midstride.engine.runs.run_report import report_of
from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.storage.store import Store
from midstride.engine.testing import assert_resumes_exactly

augment = library("augment")


class Line(TrainingModule):
    def __init__(self, lr: float = 0.1, gamma: float = 0.5, weight: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer, self.weight, self.steps = nn.Linear(2, 1), weight, 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.steps += 1
        return self.layer(batch[0]).square().mean() * self.weight

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, self.hparams["gamma"])]


def fit(run: Path, epochs: int, accept: tuple[str, ...] = (), **arguments: Any) -> None:
    data = DataLoader(TensorDataset(torch.ones(4, 2)), 2)
    trainer = Trainer(max_epochs=epochs, accept_change=accept, snapshots={"every_steps": 1})
    trainer.fit(Line(**arguments), data, run=str(run))


def facts(run: Path) -> list[dict[str, Any]]:
    """What run.json and the newest manifest say."""
    newest = SnapshotCatalog(Store.open(str(run))).snapshots()[-1]
    return [json.loads((run / "run.json").read_text()), newest.manifest["facts"]]


JOB = TrainingJob.model_validate(
    {"name": "a", "module": "m:A", "data": "m:B", "trainer": {"max_epochs": 1}, "snapshots": {"url": "."}}
)

#: arguments of the second life -> what is said, and what is recorded as asked for in vain
ROWS: dict[str, tuple[dict[str, Any], list[str], dict[str, Any]]] = {
    "a learning rate": (
        {"lr": 0.01},
        [
            "module_args differs, as accepted: the snapshot has {'gamma': 0.5, 'lr': 0.1",
            "SGD: lr is asked to be 0.01 now, and stays 0.05: the snapshot's value is used",
            "StepLR: base_lrs is asked to be [0.01] now, and stays [0.1]",
            "to train with the new values: set them in a hook",
        ],
        {
            "SGD: lr": {"asked": 0.01, "in_force": 0.05},
            "StepLR: base_lrs": {"asked": [0.01], "in_force": [0.1]},
            "module.hparams.items.lr": {"asked": 0.01, "in_force": 0.1},
        },
    ),
    "a scheduler's": (
        {"gamma": 0.25},
        ["StepLR: gamma is asked to be 0.25 now, and stays 0.5"],
        {
            "StepLR: gamma": {"asked": 0.25, "in_force": 0.5},
            "module.hparams.items.gamma": {"asked": 0.25, "in_force": 0.5},
        },
    ),
    "the module's own": (
        {"weight": 3.0},
        ["the snapshot's holds: module.hparams.items.weight (1.0, now 3.0), module.weight (1.0, now 3.0). To train"],
        {
            "module.weight": {"asked": 3.0, "in_force": 1.0},
            "module.hparams.items.weight": {"asked": 3.0, "in_force": 1.0},
        },
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_what_a_snapshot_overrides_is_named_and_recorded(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments, words, overridden = ROWS[case]
    fit(tmp_path, 1)
    with caplog.at_level(logging.WARNING):
        fit(tmp_path, 2, ("module_args",), **arguments)
    for word in words:
        assert sum(word in record.getMessage() for record in caplog.records) == 1, (word, caplog.messages)
    assert "steps" not in caplog.text
    assert [found["overridden"] for found in facts(tmp_path)] == [overridden] * 2
    at_start, at_end = (found["in_force"]["SGD: lr"] for found in facts(tmp_path))
    assert (at_start, at_end) == (0.05, 0.025)
    told = markdown_of(report_of(Run(JOB.resolved(tmp_path.parent), tmp_path.name)))
    assert "## Without effect" in told
    for name, values in overridden.items():
        assert f"- {name}: {values['in_force']}, not {values['asked']}" in told
    caplog.clear()
    fit(tmp_path, 3, ("module_args",), **arguments)  # the next life knows still what the run began with
    assert facts(tmp_path)[0]["overridden"].keys() == overridden.keys()


def test_a_learning_rate_that_no_argument_tells_of_is_named_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(tmp_path, 1)
    configure = Line.configure_optimizers

    def edited(self: Line) -> Any:
        optimizers, schedulers = configure(self)
        optimizers[0].param_groups[0]["momentum"] = 0.9
        return optimizers, schedulers

    monkeypatch.setattr(Line, "configure_optimizers", edited)
    fit(tmp_path, 2)
    assert "SGD: momentum is asked to be 0.9 now, and stays 0" in caplog.text


class Setting(enum.Enum):
    """Settings by name."""

    SMALL, LARGE = 1.0, 5.0


@dataclasses.dataclass
class Conf:
    """A configuration."""

    scale: float


#: where a setting is kept -> how it is made, how it is read, and its path
PLACES: dict[str, tuple[Callable[[float], Any], Callable[[Any], float], str]] = {
    "a dict": (lambda x: {"a": {"b": x}, "n": 0}, lambda kept: kept["a"]["b"], "kept.a.b"),
    "a list": (lambda x: [0.0, x], lambda kept: kept[1], "kept.1"),
    "a tuple": (lambda x: ("a", [x]), lambda kept: kept[1][0], "kept.1.0"),
    "a set": (lambda x: {x}, max, "kept"),
    "a named tuple": (lambda x: Point(0.0, x), lambda kept: kept.y, "kept.1"),
    "a deque": (lambda x: deque([x]), lambda kept: kept[0], "kept.0"),
    "a deque's size": (lambda x: deque([0], int(x)), lambda kept: float(kept.maxlen), "kept.maxlen"),
    "a factory": (lambda x: defaultdict(lambda: x), lambda kept: kept.default_factory(), "kept.default_factory.x"),
    "a tensor": (lambda x: torch.tensor([0.0, x]), lambda kept: float(kept[1]), "kept"),
    "an array": (lambda x: np.full(100, x), lambda kept: float(kept[7]), "kept"),
    "a scalar": (np.float32, float, "kept"),
    "an enum": (Setting, lambda kept: kept.value, "kept"),
    "a path": (lambda x: Path(f"/{x}"), lambda kept: float(kept.name), "kept"),
    "a closure": (lambda x: lambda: x, lambda kept: kept(), "kept.x"),
    "a partial": (lambda x: partial(max, x), lambda kept: kept(0.0), "kept.args.0"),
    "a dataclass": (Conf, lambda kept: kept.scale, "kept.scale"),
    "a namespace": (lambda x: SimpleNamespace(of=Conf(x)), lambda kept: kept.of.scale, "kept.of.scale"),
    "a library's object": (lambda x: [augment.Scale(1.0, x)], lambda kept: kept[0].factor, "kept.0.factor"),
    "an array of objects": (lambda x: np.array([None, x], dtype=object), lambda kept: kept[1], "kept.1"),
    "bytes in memory": (lambda x: bytearray([0, int(x)]), lambda kept: float(kept[1]), "kept"),
    "a long dict": (lambda x: {key: x * (key == 1400) for key in range(1500)}, lambda kept: kept[1400], "kept"),
    "a long list": (lambda x: [{"a": x * (key == 1400)} for key in range(1500)], lambda kept: kept[1400]["a"], "kept"),
    "a sparse tensor": (lambda x: torch.tensor([0.0, x]).to_sparse(), lambda kept: float(kept.sum()), "kept"),
    "a masked array": (lambda x: np.ma.array([1.0, x], mask=[True, False]), lambda kept: float(kept[1]), "kept"),
    "a table": (lambda x: pd.DataFrame({"a": ["b", "c"], "x": [0.0, x]}), lambda kept: float(kept.x[1]), "kept"),
    "more items": (lambda x: [1.0] * int(x), lambda kept: float(len(kept)), "kept"),
}


class Point(NamedTuple):
    """Two settings."""

    x: float
    y: float


def fit_kept(run: Path, place: str, value: float, epochs: int, accept: str = "") -> float:
    make, read, _ = PLACES[place]

    class Keeps(Line):
        def __init__(self) -> None:
            super().__init__()
            self.kept, self.seen = make(value), []

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.seen.append(read(self.kept))
            return super().training_step(batch, batch_idx)

    Keeps.__qualname__ = "Keeps"
    module = Keeps()
    data = DataLoader(TensorDataset(torch.ones(4, 2)), 2)
    Trainer(max_epochs=epochs, accept_change=accept).fit(module, data, run=str(run))
    return float(module.seen[-1])


@pytest.mark.parametrize("place", PLACES)
def test_a_setting_is_named_and_taken_if_accepted(place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = PLACES[place][2]
    assert fit_kept(tmp_path, place, 1.0, 1) == 1.0
    assert caplog.messages == []
    for epochs in (2, 3):  # until it is taken
        caplog.clear()
        assert fit_kept(tmp_path, place, 5.0, epochs) == 1.0
        assert f"the snapshot's holds: module.{path} (" in caplog.text
        assert "--accept-change settings" in caplog.text
    caplog.clear()
    assert fit_kept(tmp_path, place, 5.0, 4, "settings") == 5.0
    assert f"the new one holds: module.{path} (" in caplog.text
    caplog.clear()
    assert fit_kept(tmp_path, place, 5.0, 5) == 5.0
    assert caplog.messages == []


def test_what_training_has_changed_is_no_setting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    starts = [0, 7]

    class Counts(Line):
        def __init__(self) -> None:
            super().__init__()
            start = starts.pop(0)
            self.counts = {"steps": start, "seen": [start]}

        def on_train_batch_end(self, *_: Any) -> None:
            self.counts["steps"] += 1
            self.counts["seen"].append(0)
            self.counts["seen"][0] += 1

    for epochs in (1, 2):
        data = DataLoader(TensorDataset(torch.ones(4, 2)), 2)
        module = Counts()
        Trainer(max_epochs=epochs).fit(module, data, run=str(tmp_path))
    assert caplog.messages == []
    assert module.counts["steps"] == 4


def test_the_length_of_a_schedule_is_named_and_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Decays(Line):
        def configure_optimizers(self) -> Any:
            optimizer, total = torch.optim.SGD(self.parameters(), lr=0.1), self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def rate(run: str, epochs: int, accept: str = "") -> float:
        trainer = Trainer(max_epochs=epochs, accept_change=accept)
        trainer.fit(Decays(), DataLoader(TensorDataset(torch.ones(4, 2)), 2), run=str(tmp_path / run))
        return float(trainer.optimizers[0].param_groups[0]["lr"])

    for run in ("a", "b"):
        rate(run, 1)
    assert rate("a", 2) == 0.0
    assert "schedulers.0.lr_lambdas.0.total (2, now 4)" in caplog.text
    rate("b", 2, "settings")
    assert "the new one holds: schedulers.0.lr_lambdas.0.total (2, now 4)" in caplog.text


def test_a_learning_rate_that_is_accepted_moves_in_proportion(tmp_path: Path) -> None:
    fit(tmp_path, 1)
    fit(tmp_path, 2, ("module_args", "settings"), lr=0.01)
    assert facts(tmp_path)[1]["in_force"]["SGD: lr"] == pytest.approx(0.01 * 0.5**2)
    assert "overridden" not in facts(tmp_path)[1]


def test_a_hook_that_changes_training_as_it_is_saved_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Evaluates(Line):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["a"] = 1
            self.trainer.optimizers[0].param_groups[0]["momentum"] = 0.5

    class Averages(Callback):
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["b"] = 2
            if trainer.global_step:
                module.layer.weight.data.mul_(0.5)

    data = DataLoader(TensorDataset(torch.ones(4, 2)), 2)
    trainer = Trainer(max_epochs=2, callbacks=[Averages()], snapshots={"every_steps": 1})
    trainer.fit(Evaluates(), data, run=str(tmp_path))

    found = [text for text in caplog.messages if "changes the training while a snapshot is taken" in text]
    assert [text.partition(" ")[0] for text in found] == ["Averages.on_save_checkpoint"]  # momentum was set before
    assert "module/layer.weight" in found[0]


def test_an_undisturbed_resume_says_nothing_of_settings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, 1)
    fit(tmp_path, 2)
    assert "asked" not in caplog.text
    assert not any("overridden" in found for found in facts(tmp_path))


def test_a_layer_that_a_hook_adds_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Caches(Line):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if self.trainer.global_step:
                self.add_module(f"more{len([*self.children()])}", torch.nn.Identity())

    data = DataLoader(TensorDataset(torch.ones(4, 2)), 2)
    Trainer(max_epochs=1, snapshots={"every_steps": 1}).fit(Caches(), data, run=str(tmp_path))
    assert "changes the training while a snapshot is taken: structure/modules/more" in caplog.text


@pytest.mark.parametrize(
    ("before", "now", "changes"),
    [
        (1.0, 1.0, {}),
        (1.0, 1, {"limit_train_batches": "the snapshot has 1.0, this run has 1"}),
        (1, 1.0, {"limit_train_batches": "the snapshot has 1, this run has 1.0"}),
    ],
)
def test_one_batch_and_all_of_them_differ(before: float, now: float, changes: dict[str, str]) -> None:
    assert identity_changes({"limit_train_batches": before}, {"limit_train_batches": now}) == changes


class Adaptive(Line):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def test_another_optimizer_than_the_snapshots_is_refused(tmp_path: Path) -> None:
    fit(tmp_path / "run", 1)
    data = DataLoader(TensorDataset(torch.ones(4, 2)), 2)
    words = "has the state of SGD, StepLR, and configure_optimizers returned AdamW: start the run with those it had"
    with pytest.raises(IdentityChanged, match=words):
        Trainer(max_epochs=2, accept_change="module").fit(Adaptive(), data, run=str(tmp_path / "run"))


class Sets(Callback):
    """Sets an attribute of the Trainer, as Lightning's users do, when the first batch has been trained on."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        setattr(trainer, self.name, self.value)


def fit_setting(name: str, value: Any) -> Trainer:
    trainer = Trainer(max_epochs=2, callbacks=Sets(name, value))
    trainer.fit(Line(), DataLoader(TensorDataset(torch.ones(4, 2)), 2))
    return trainer


@pytest.mark.parametrize(
    ("name", "value", "way_out"),
    [
        ("accumulate_grad_batches", 2, "step by hand"),
        ("max_epochs", 1, "give it to Trainer"),
        ("precision", "16", "give it to Trainer"),
    ],
)
def test_an_option_that_is_set_on_the_trainer_is_refused_by_name(name: str, value: Any, way_out: str) -> None:
    with pytest.raises(UserCodeError, match=rf"trainer\.{name} cannot be set here.* {way_out}"):
        fit_setting(name, value)


@pytest.mark.parametrize("change", [lambda them: them.append(Sets("a", 1)), lambda them: them.clear()])
def test_changed_callbacks_of_a_trainer_are_refused(change: Any) -> None:
    trainer = Trainer(max_epochs=1, callbacks=Sets("a", 1))
    with pytest.raises(UserError, match=r"trainer\.callbacks cannot be changed: pass callbacks to Trainer"):
        change(trainer.callbacks)
    with pytest.raises(AttributeError, match=r"trainer\.callbacks cannot be set here.* give it to Trainer"):
        trainer.callbacks = [Sets("a", 1)]  # type: ignore[assignment]


def test_the_rest_of_an_epoch_is_not_left_out_without_a_word() -> None:
    class Leaving(Line):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:  # type: ignore[override]
            return -1 if batch_idx else None

    with pytest.raises(UserError, match=r"on_train_batch_start returned -1 for batch 1.* limit_train_batches"):
        Trainer(max_epochs=1).fit(Leaving(), DataLoader(TensorDataset(torch.ones(4, 2)), 2))


def test_should_stop_that_a_callback_sets_ends_the_fit() -> None:
    assert fit_setting("should_stop", True).global_step == 1
    assert fit_setting("should_stop", False).global_step == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"seed": 1 << 64}, "seed: should be a whole number below 2**63, not 18446744073709551616"),
        ({"seed": 1.5}, "seed: should be a whole number below 2**63, not 1.5"),
        ({"seed": True}, "seed: should be a whole number below 2**63, not True"),
        ({"callbacks": "best"}, "callbacks: should be objects of classes derived from Callback, not 'best'"),
        (
            {"callbacks": [BestCheckpoint]},
            "should be objects of classes derived from Callback, not the class BestCheckpoint: make one",
        ),
        ({"val_check_interval": True}, "val_check_interval: should be a whole number; or should be a number, not True"),
        ({"check_val_every_n_epoch": None}, "give their number, such as val_check_interval=100, not 1.0"),
        ({"val_check_interval": "00:01:00"}, "val_check_interval: should be a number of batches, such as 100, or a sh"),
        ({"val_check_interval": timedelta(1)}, "a clock would decide which weights are validated, not datetime.timed"),
        (
            {"accumulate_grad_batches": {4: 2}},
            "should be one number for the whole run; for windows that change, use GradientAccumulationScheduler",
        ),
        ({"snapshots": {"every_seconds": True}}, "snapshots.every_seconds: should be a number, not True"),
        ({"snapshots": False}, "snapshots: should be keys and values, not False"),
    ],
)
def test_an_argument_of_another_type_is_refused_early(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError) as refused:
        Trainer(**arguments)
    assert words in str(refused.value)


def test_an_epoch_end_broken_off_by_a_stop_resumes_exactly() -> None:
    class Stops(Line):
        validated = 0

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if batch_idx == 1:
                self.trainer.stop()
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.validated += 1

        def on_train_epoch_end(self) -> None:
            assert (self.trainer.progress.batch, self.validated) == (2, 2)
            with torch.no_grad():
                self.layer.weight.mul_(1 + self.validated)

        def train_dataloader(self) -> Any:
            return DataLoader(TensorDataset(torch.ones(8, 2)), 1)

        val_dataloader = train_dataloader

    assert_resumes_exactly(Stops, steps=6)
