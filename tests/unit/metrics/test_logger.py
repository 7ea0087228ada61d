"""What is logged, under which names, and what is refused; metrics stay out of weights."""

import csv
import io
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from support.nets import Net
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset

from midstride.engine import Trainer
from midstride.engine.errors import EngineError, UserError
from midstride.engine.loggers.base import CommittedRows
from midstride.engine.metrics.torchmetrics_state import TorchmetricsState
from midstride.engine.snapshots.reader import weights_at
from midstride.engine.state.codec import decode, encode
from midstride.engine.state.differences import differences


def numbers() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(5.0)[:, None]), 2)


class Logs(Net):
    lr = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.mean.persistent(True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("epoch mean", batch[0].mean(), on_step=True, on_epoch=True)
        self.log("metric", self.mean(batch[0]))
        self.log("of metric", self.mean, on_step=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mean.update(batch[0])
        self.log("first", self.mean)
        self.log("second", self.mean)


class LogsEverywhere(Logs):
    """Logs where it is too late, or nothing is kept."""

    def on_validation_end(self) -> None:
        self.log("late", 1.0)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("prediction", 1.0)


def test_means_are_weighted_and_metrics_have_batch_values(tmp_path: Path) -> None:
    trainer = Trainer(max_epochs=1)
    trainer.fit(Logs(), numbers(), run=str(tmp_path))
    header, *rows = [line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines()]
    columns = dict(zip(header, zip(*rows, strict=True), strict=True))
    assert columns["epoch mean_step"] == columns["metric"] == columns["of metric"] == ("0.5", "2.5", "4.0")
    assert columns["epoch mean"] == columns["of metric_epoch"] == ("", "", "2.0")
    assert trainer.callback_metrics["epoch mean_epoch"] == trainer.callback_metrics["epoch mean"] == 2.0


def test_one_metric_may_be_logged_under_two_names() -> None:
    module = Logs()
    assert Trainer().validate(module, DataOf(val_dataloader=numbers)) == {"first": 2.0, "second": 2.0}
    assert module.mean._update_count == 0


class CountsBatches(Logs):
    """Logs, in a validation, how many batches were trained before it."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trained = batch_idx + 1

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("after", float(self.trained))


@pytest.mark.parametrize(
    ("ends", "rows"),
    [([3], {1: "6.0", 2: "9.0", 3: "12.0"}), ([1, 3], {1: "3.0", 2: "9.0", 3: "12.0"}), ([1, 2], {1: "3.0", 2: "6.0"})],
    ids=str,
)
def test_a_validation_without_an_open_row_logs_in_the_next_one(
    ends: list[int], rows: dict[int, str], tmp_path: Path
) -> None:
    """Validations come after batches 3, 6, 9 and 12, steps after 4, 8 and 12; a fit ends with a step."""
    samples = TensorDataset(torch.arange(24.0)[:, None])
    data = DataOf(train_dataloader=lambda: DataLoader(samples, 1), val_dataloader=numbers)
    for steps in ends:
        options = {"accumulate_grad_batches": 4, "val_check_interval": 3, "enable_progress_bar": False}
        Trainer(max_steps=steps, **options).fit(CountsBatches(), data, run=str(tmp_path))
    found = csv.DictReader(io.StringIO((tmp_path / "metrics.csv").read_text()))
    assert {int(row["step"]): row["after"] for row in found} == rows


class DataOf:
    def __init__(self, **loaders: Any) -> None:
        self.__dict__.update(loaders)


def test_weights_hold_no_state_of_metrics(tmp_path: Path) -> None:
    Trainer(max_epochs=1).fit(Logs(), numbers(), run=str(tmp_path))
    assert set(weights_at(str(tmp_path / "last")).state_dict) == {"layer.weight", "layer.bias"}
    module = Logs()
    module.mean.update(3.0)
    module.load_state_dict(weights_at(str(tmp_path / "last")).state_dict)
    assert float(module.mean.compute()) == 3.0


@pytest.mark.parametrize(
    ("verb", "message"),
    [("validate", "self.log.'late'. after the values"), ("predict", "self.log.'prediction'. in a prediction")],
)
def test_what_nobody_would_see_is_refused(verb: str, message: str) -> None:
    data = DataOf(val_dataloader=numbers, predict_dataloader=numbers)
    with pytest.raises(EngineError, match=message):
        getattr(Trainer(), verb)(LogsEverywhere(), data)


def test_the_end_of_a_prediction_is_told_that_it_cannot_log() -> None:
    class LogsAtTheEnd(Logs):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            pass

        def on_predict_end(self) -> None:
            self.log("done", 1.0)

    with pytest.raises(EngineError, match=r"self.log.'done'. in a prediction"):
        Trainer().predict(LogsAtTheEnd(), DataOf(predict_dataloader=numbers))


def test_one_name_has_one_reduction() -> None:
    class Torn(Logs):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("x", 1.0, reduce_fx="sum" if batch_idx else "mean")

    with pytest.raises(UserError, match="reduce_fx='sum', sync_dist=False, but had reduce_fx='mean'"):
        Trainer().validate(Torn(), DataOf(val_dataloader=numbers))


def test_a_metric_without_a_batch_value_names_the_way_out() -> None:
    class Updates(Logs):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.mean.update(batch[0])
            self.log("mean", self.mean, on_step=True)
            return self.layer(batch[0]).mean()

    with pytest.raises(UserError, match="the MeanMetric has no single value for this batch"):
        Trainer(max_epochs=1).fit(Updates(), numbers())


def test_a_wrapper_without_batch_value_logs_its_result() -> None:
    class Wrapped(Logs):
        by_value = False

        def __init__(self) -> None:
            super().__init__()
            self.recent = torchmetrics.wrappers.Running(torchmetrics.MeanMetric(), window=2)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            value = self.recent(batch[0])
            self.log("recent", value if self.by_value else self.recent, on_step=True)
            return self.layer(batch[0]).mean()

    with pytest.raises(UserError, match="such as Running, log what the call returns"):
        Trainer(max_epochs=1).fit(Wrapped(), numbers())
    Wrapped.by_value = True
    trainer = Trainer(max_epochs=1)
    trainer.fit(Wrapped(), numbers())
    assert "recent" in trainer.callback_metrics


@pytest.mark.parametrize("value", ["0.5", None, 1j, Decimal(1)], ids=repr)
def test_what_is_no_real_number_is_refused_where_it_is_logged(value: Any) -> None:
    class Odd(Logs):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("odd", value)
            return self.layer(batch[0]).mean()

    with pytest.raises(UserError, match=rf"self.log\('odd'\) was given a {type(value).__name__}; a number or a tensor"):
        Trainer(max_epochs=1).fit(Odd(), numbers())


def seen_by(module: nn.Module) -> TorchmetricsState:
    return TorchmetricsState(module, lambda value: [value], 1)


def test_metrics_share_their_sums_after_a_resume() -> None:
    def module() -> nn.Module:
        classes: dict[str, Any] = {"task": "multiclass", "num_classes": 3, "average": "macro"}
        kinds = {"Recall": torchmetrics.Recall(**classes), "Precision": torchmetrics.Precision(**classes)}
        return nn.ModuleDict({"both": torchmetrics.MetricCollection(kinds)})

    def update(module: Any, shift: int) -> None:
        module["both"].update(torch.arange(6) % 3, (torch.arange(6) + shift) % 6 // 2)

    undisturbed, resumed = module(), module()
    before = seen_by(undisturbed)
    update(undisturbed, 0)
    after = seen_by(resumed)
    saved = encode(before.state_dict())
    after.load_state_dict(decode(saved.document, saved.tensors))
    for one in (undisturbed, resumed):
        update(one, 1)
    assert not differences(before.state_dict(), after.state_dict())


def test_what_a_metric_saw_is_taken_back_with_the_value_it_kept() -> None:
    module = nn.ModuleDict({"mean": torchmetrics.MeanMetric()})
    mean: Any = module["mean"]
    mean.update(1.0)
    take_back = seen_by(module).rollback_point()
    mean.update(5.0)
    assert mean.compute() == 3.0
    take_back()
    assert mean.compute() == 1.0


class Level(torchmetrics.Metric):
    """Its states have defaults that are no values: a mean and a maximum would take them for some."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")
        self.add_state("largest", torch.tensor(0.0), dist_reduce_fx="max")

    def update(self, value: float) -> None:
        self.mean = self.largest = torch.tensor(value)

    def compute(self) -> Tensor:
        return torch.stack([self.mean, self.largest])


@pytest.mark.parametrize(
    ("seen", "mean", "largest"),
    [((-8.0, None, -4.0), -6.0, -4.0), ((None, None, -4.0), -4.0, -4.0), ((None, None, None), 0.0, 0.0)],
)
def test_a_rank_without_values_counts_in_no_mean_or_maximum(
    seen: tuple[float | None, ...], mean: float, largest: float
) -> None:
    levels = [Level() for _ in seen]
    for level, value in zip(levels, seen, strict=True):
        if value is not None:
            level.update(value)
    said = [(level._update_count, {"mean": level.mean, "largest": level.largest}) for level in levels]
    for level in levels:
        module = nn.Module()
        module.level = level
        metrics = TorchmetricsState(module, lambda value: said, len(levels))

        [found] = metrics.compute(["level"])

        assert found.tolist() == [mean, largest]


class Flags(Net):
    """Logs what is true or false."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("odd", batch_idx % 2 == 1)
        self.log("large", batch[0].mean() > 1.0)
        return super().training_step(batch, batch_idx)


def test_true_and_false_are_logged_as_numbers(tmp_path: Path) -> None:
    Trainer(max_epochs=1, enable_progress_bar=False).fit(Flags(), numbers(), run=str(tmp_path / "run"))
    text = (tmp_path / "run" / "metrics.csv").read_text()
    rows = [row.values for row in CommittedRows([text])]
    assert [row["odd"] for row in rows] == [0.0, 1.0, 0.0]
    assert [row["large"] for row in rows] == [0.0, 1.0, 1.0]
    assert "True" not in text


class Measures(Net):
    """Metrics logged by the defaults of a step: called, updated alone, of a collection, and in `log_dict`."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.updated = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
        extremes = {"low": torchmetrics.MinMetric(), "high": torchmetrics.MaxMetric()}
        self.several = torchmetrics.MetricCollection(extremes)
        self.both = torchmetrics.SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.called(batch[0])
        self.updated.update(batch[0])
        self.several(batch[0])
        self.both(batch[0])
        self.log("called", self.called)
        self.log("updated", self.updated)
        self.log_dict(self.several)  # type: ignore[arg-type]
        self.log("both", self.both, on_epoch=True)
        return super().training_step(batch, batch_idx)


def test_rows_have_the_values_of_batches_and_of_the_epoch(tmp_path: Path) -> None:
    trainer = Trainer(max_epochs=1, enable_progress_bar=False)
    trainer.fit(Measures(), numbers(), run=tmp_path)
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    found = {name: [row[name] for row in rows] for name in rows[0]}
    assert found["called_step"] == ["0.5", "2.5", "4.0"]
    assert (found["low_step"], found["high_step"]) == (["0.0", "2.0", "4.0"], ["1.0", "3.0", "4.0"])
    assert found["both_step"] == ["1.0", "5.0", "4.0"]
    of_epoch = {"called": "2.0", "updated": "2.0", "low": "0.0", "high": "4.0", "both": "10.0"}
    assert {name: found[name] for name in of_epoch} == {name: ["", "", value] for name, value in of_epoch.items()}
    assert "updated_step" not in found
    assert {name: trainer.callback_metrics[name] for name in of_epoch} == {k: float(v) for k, v in of_epoch.items()}


class Packed(Net):
    """Logs means over sequences in one tensor."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("train", float(len(batch["lengths"])), on_step=False, on_epoch=True)
        return self.layer(batch["values"][:, None]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", float(len(batch["lengths"])))


def packed(sequences: list[Tensor]) -> dict[str, Any]:
    return {"values": torch.cat(sequences), "lengths": torch.tensor([*map(len, sequences)])}


class Sequences(IterableDataset[Any]):
    """Sequences of growing length, one by one or packed by fours."""

    def __init__(self, packs: bool) -> None:
        self.packs = packs

    def __iter__(self) -> Iterator[Any]:
        every = [torch.ones(length) for length in range(1, 11)]
        return iter([packed(every[at : at + 4]) for at in (0, 4, 8)] if self.packs else every)


class Bulk(Dataset[Any]):
    """Reads the sequences of a list of indices at once."""

    def __getitem__(self, indices: list[int]) -> Any:
        return packed([torch.ones(index + 1) for index in indices])


LOADERS = {
    "map-style": lambda: DataLoader([torch.ones(length) for length in range(1, 11)], 4, collate_fn=packed),  # type: ignore[arg-type,misc,var-annotated]
    "stream": lambda: DataLoader(Sequences(packs=False), 4, collate_fn=packed),
    "whole batches": lambda: DataLoader(Sequences(packs=True), None),
    "a sampler of batches": lambda: DataLoader(Bulk(), None, sampler=BatchSampler(range(10), 4, drop_last=False)),
}


@pytest.mark.parametrize(
    ("kind", "window"), [*((kind, 1) for kind in LOADERS), ("map-style", 2)], ids=[*LOADERS, "accumulation"]
)
def test_packed_batches_weigh_by_their_samples(kind: str, window: int, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(max_epochs=1, enable_progress_bar=False, accumulate_grad_batches=window)
    trainer.fit(Packed(), LOADERS[kind](), LOADERS[kind]())
    by_form = [(4, 10), (4, 26), (2, 19)]
    weights = by_form if kind == "whole batches" else [(4, 4), (4, 4), (2, 2)]
    expected = sum(value * weight for value, weight in weights) / sum(weight for _, weight in weights)
    for name in ("train", "validation"):
        assert trainer.callback_metrics[name] == pytest.approx(expected)
    warned = [record.getMessage() for record in caplog.records if "batch_size=" in record.getMessage()]
    assert len(warned) == (kind == "whole batches")


class Ranges(Dataset[Any]):
    """Reads the samples between two bounds at once."""

    def __getitem__(self, bounds: list[int]) -> Any:
        count = bounds[1] - bounds[0]
        return {"values": torch.ones(count), "lengths": torch.ones(count)}


def test_a_pair_of_numbers_from_a_sampler_is_no_batch_of_two() -> None:
    trainer = Trainer(max_epochs=1, enable_progress_bar=False)
    trainer.fit(Packed(), DataLoader(Ranges(), None, sampler=[[0, 4], [4, 8], [8, 10]]))
    assert trainer.callback_metrics["train"] == pytest.approx((2 * 4 * 4 + 2 * 2) / 10)


class PackedInLanes(Packed):
    """Logs in a hook, too, and counts samples there."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = list[int]()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("hook", float(batch_idx), on_step=False, on_epoch=True)
        self.counts.append(self.trainer.metric_logger.samples())


def test_lanes_weigh_packed_batches_by_their_samples() -> None:
    module, trainer = PackedInLanes(), Trainer(lanes=2, max_epochs=1, enable_progress_bar=False)
    trainer.fit(module, LOADERS["map-style"](), LOADERS["map-style"]())
    expected = {"train": (2 * 4 * 4 + 2 * 1) / 10, "validation": (2 * 4 * 4 + 2 * 1) / 10, "hook": 2 / 10}
    assert {name: trainer.callback_metrics[name] for name in expected} == pytest.approx(expected)
    assert module.counts == [8, 2]


class Listed(Net):
    """Logs a mean over batches whose form tells too little."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("value", 1.0, on_step=False, on_epoch=True)
        return self.layer(torch.ones(1, 1)).sum()


class Foreign:
    """A batch that can be moved, of a library that nobody knows."""

    def to(self, device: Any) -> "Foreign":
        return self


@pytest.mark.parametrize(
    ("batches", "doubt"),
    [
        ([[torch.zeros(3, 8, 8)] * 4, [torch.zeros(3, 8, 8)] * 2], "lists around it have 4 and 2"),
        ([[torch.zeros(4, 8), torch.zeros(4, 8)], [torch.zeros(2, 8), torch.zeros(2, 8)]], ""),
        ([Foreign()], "a Foreign does not tell its samples"),
        ([[torch.zeros(4, 2), torch.zeros(4)], [torch.zeros(2, 2), torch.zeros(2)]], ""),
        ([["a", "b"], ["c"]], ""),
        ([[(["a", "b"], 1)] * 4], "a list does not tell its samples"),
        ([[torch.zeros(4, 2), torch.zeros(4)], {"x": torch.zeros(4, 2)}], ""),
        ([[torch.zeros(4, 2), torch.zeros(4)], [torch.zeros(4, 2), torch.zeros(4), torch.zeros(4)]], ""),
    ],
    ids=[
        "images",
        "inputs and outputs",
        "a library's",
        "tensors",
        "texts",
        "pairs",
        "a dict now and then",
        "a mask now and then",
    ],
)
def test_a_form_that_leaves_the_samples_open_is_named(
    batches: list[Any], doubt: str, caplog: pytest.LogCaptureFixture
) -> None:
    Trainer(max_epochs=1, enable_progress_bar=False).fit(Listed(), batches)
    assert doubt in caplog.text
    assert ("batch_size=" in caplog.text) == bool(doubt)
