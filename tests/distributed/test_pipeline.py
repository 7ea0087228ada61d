"""Pipelines beyond the laws: values counted once, weights that are whole, a cut that stays, what is refused."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import CatMetric

from midstride.engine import BestCheckpoint, DataModule, EarlyStopping, Trainer, TrainingModule
from midstride.engine.errors import EngineError
from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.snapshots.reader import weights_at
from midstride.engine.storage.store import Store
from midstride.engine.testing import run_ranks

SAMPLES = 13


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from (Numbers()[index] for index in range(SAMPLES))


class Data(DataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Numbers(), 4)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Numbers(), 3)

    test_dataloader = predict_dataloader = val_dataloader


class StreamData(Data):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Stream(), 4)


class Pause(nn.Module):
    """Takes its time, which a later life may be told to take elsewhere."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self._pause_s = pause_s

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._pause_s)
        return x


class Counts(TrainingModule):
    """Logs what it sees; its layers have three places to cut."""

    def __init__(self, first_s: float = 0.0, last_s: float = 0.0) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(
            *(nn.Linear(1, 4), Pause(first_s), nn.Linear(4, 4), nn.Linear(4, 4), Pause(last_s), nn.Linear(4, 1))
        )
        self.all = CatMetric()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.sequential_module(batch / SAMPLES)

    def training_step_end(self, outputs: Tensor, batch: Any) -> Tensor:
        loss = (outputs - batch / SAMPLES).square().mean()
        self.log("train/count", float(len(batch)), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.sequential_module(batch / SAMPLES)
        self.log("loss", (outputs - batch / SAMPLES).square().mean(), sync_dist=True)
        self.log("sum", batch.sum(), reduce_fx="sum", sync_dist=True)
        self.all.update(batch)
        self.log("all", self.all)
        return outputs

    test_step = validation_step

    def validation_step_end(self, outputs: Tensor, batch: Any) -> Tensor:
        self.seen += outputs.flatten().tolist()
        return outputs

    def on_validation_epoch_end(self) -> None:
        self.log("spread", max(self.seen) - min(self.seen))
        self.seen = []

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        outputs: Tensor = self.sequential_module(batch / SAMPLES)
        return outputs

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def whole_life(folder: str) -> None:
    """Evaluate, fit, and evaluate again, in two pipelines of two stages."""
    trainer = Trainer(
        strategy="pipeline",
        strategy_args={"stages": 2},
        max_epochs=6,
        callbacks=[BestCheckpoint("loss"), EarlyStopping("loss", patience=2, min_delta=0.01)],
        enable_progress_bar=False,
    )
    module, data = Counts(), Data()
    values = [trainer.validate(module, data)]
    trainer.fit(module, data, run=f"{folder}/run")
    values += [dict(trainer.callback_metrics), trainer.test(module, data, ckpt_path="best")]
    predictions = [prediction.flatten().tolist() for prediction in trainer.predict(module, data)]
    found = {"values": values, "predictions": predictions, "step": trainer.progress.step}
    Path(folder, f"{trainer.world.rank}.json").write_text(json.dumps(found))


def test_values_count_once_and_are_alike_on_every_rank(tmp_path: Path) -> None:
    assert run_ranks(whole_life, str(tmp_path), processes=4) == [0] * 4
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    before, fitted, tested = found[0]["values"]
    assert all(rank["values"] == found[0]["values"] for rank in found)
    for values in (before, tested):
        assert values["sum"] == sum(range(SAMPLES))
        assert sorted(values[name] for name in values if name.startswith("all")) == list(range(SAMPLES))
    assert fitted["train/count"] == SAMPLES + 1  # one is repeated, so that both pipelines have as many
    assert found[0]["step"] == 6  # two a pipeline and epoch, and two epochs without an improvement
    assert found[0]["predictions"] == found[1]["predictions"] != found[2]["predictions"] == found[3]["predictions"]
    alone = Counts()
    alone.load_state_dict(weights_at(str(tmp_path / "run" / "best")).state_dict)
    newest = SnapshotCatalog(Store.open(tmp_path / "run")).snapshots()[-1]
    last, of_snapshot = (weights_at(str(tmp_path / "run" / path)).state_dict for path in ("last", newest.path))
    assert all(torch.equal(of_snapshot[name], value) for name, value in last.items()), "layers of all stages"
    assert Trainer(enable_progress_bar=False).test(alone, Data())["loss"] == pytest.approx(tested["loss"], rel=1e-6)


def fit_first(folder: str) -> None:
    """Fit, then evaluate, and once more with another timeout."""
    module, found = Counts(), []
    for timeout_s in (600.0, 300.0):
        trainer = Trainer(
            strategy="pipeline", max_epochs=1, collective_timeout_s=timeout_s, snapshots=None, enable_progress_bar=False
        )
        trainer.fit(module, Data())
        found += [trainer.test(module, Data())["sum"], trainer.validate(module, Data())["sum"]]
    Path(folder, f"{trainer.world.rank}.json").write_text(json.dumps(found))


def test_an_evaluation_may_follow_a_fit(tmp_path: Path) -> None:
    assert run_ranks(fit_first, str(tmp_path), processes=2) == [0, 0]
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [sum(range(SAMPLES))] * 4


def fit(run: str, module: dict[str, Any], max_epochs: int, arguments: dict[str, Any]) -> None:
    trainer = Trainer(
        strategy="pipeline",
        strategy_args=arguments,
        max_epochs=max_epochs,
        snapshots={"every_steps": 1},
        enable_progress_bar=False,
    )
    logging.getLogger("midstride").addHandler(logging.FileHandler(f"{run}.log"))
    try:
        trainer.fit(Counts(**module), StreamData(), run=run)
    except EngineError as error:
        Path(run).with_name(f"{trainer.world.rank}.txt").write_text(str(error))
        raise


def cuts(run: Path) -> Iterator[list[int]]:
    for snapshot in SnapshotCatalog(Store.open(str(run))).snapshots():
        yield snapshot.manifest["facts"]["strategy"]["balance"]


def test_a_cut_by_time_stays_and_other_stages_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    timed = {"balance": "time"}
    assert run_ranks(fit, str(run), {"first_s": 0.2}, 1, timed, processes=2) == [0, 0]
    assert run_ranks(fit, str(run), {"last_s": 0.2}, 2, timed, processes=2) == [0, 0]
    first, *others = cuts(run)
    assert tmp_path.joinpath("run.log").read_text().count(f"To repeat this cut: balance: {first}") == 1
    assert first[0] <= 2  # where the pause is in the later life, that would be 4 or more
    assert all(cut == first for cut in others)
    assert run_ranks(fit, str(run), {}, 3, {"balance": [2, 2, 2]}, processes=3) == [2, 2, 2]
    said = (tmp_path / "2.txt").read_text()
    assert "was taken by 2 processes, now there are 3, and strategy pipeline continues with 2 only" in said
    assert run_ranks(fit, str(run), {}, 3, {"balance": [3, 3]}, processes=2) == [2, 2]
    said = (tmp_path / "1.txt").read_text()
    assert f"strategy: the snapshot has 'pipeline(stages=2, balance={first}, micro_batches=2)'" in said
    assert "this run has 'pipeline(stages=2, balance=[3, 3], micro_batches=2)'" in said


class Keeps(Counts):
    """Keeps what it is trained on, of whatever loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(self.joined(batch), batch_idx)

    def training_step_end(self, outputs: Tensor, batch: Any) -> Tensor:
        self.given += self.joined(batch).flatten().tolist()
        return super().training_step_end(outputs, self.joined(batch))

    @staticmethod
    def joined(batch: Any) -> Tensor:
        return torch.cat(list(batch.values())) if isinstance(batch, dict) else batch


class Counting(Numbers):
    """Counts what it is asked for."""

    asked = 0

    def __getitem__(self, index: int) -> Tensor:
        self.asked += 1
        return super().__getitem__(index)


class Turning(Stream):
    """Begins each epoch one sample later."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        yield from (Numbers()[(index + self.epoch) % SAMPLES] for index in range(SAMPLES))


def drawn() -> DataLoader[Any]:
    return DataLoader(Numbers(), 4, shuffle=True, generator=torch.Generator().manual_seed(3))


READ: dict[str, Callable[[], Any]] = {
    "drawn": drawn,
    "counting": lambda: DataLoader(Counting(), 4),
    "several": lambda: {"drawn": drawn(), "turning": DataLoader(Turning(), 4)},
}


def keep(folder: str, name: str, arguments: dict[str, Any]) -> None:
    module, loaders = Keeps(), READ[name]()
    options: dict[str, Any] = {"strategy_args": arguments, "max_epochs": 2, "limit_val_batches": 0}
    trainer = Trainer(strategy="pipeline", enable_progress_bar=False, **options)
    trainer.fit(module, loaders)
    if trainer.world.is_first:
        asked = loaders.dataset.asked if name == "counting" else 0
        Path(folder, "given.json").write_text(json.dumps([asked, module.given]))


@pytest.mark.parametrize("name", READ)
def test_the_batch_that_measures_layers_counts_as_unread(name: str, tmp_path: Path) -> None:
    given = []
    for arguments in ({"balance": [3, 3]}, {}):
        assert run_ranks(keep, str(tmp_path), name, arguments, processes=2) == [0, 0]
        given.append(json.loads((tmp_path / "given.json").read_text()))
    assert given[0] == given[1]


class Fails(nn.Module):
    """Raises in training; what finds out the shape of its output gives it zeros."""

    def forward(self, x: Tensor) -> Tensor:
        if x.any():
            raise ValueError("no such number")
        return x


def fails_at(stage: int, folder: str) -> None:
    layers: list[nn.Module] = [nn.Linear(1, 1) for _ in range(3)]
    layers[stage] = nn.Sequential(layers[stage], Fails())
    module = Counts()
    module.sequential_module = nn.Sequential(*layers)
    options = {"balance": [1, 1, 1], "micro_batches": 2}
    trainer = Trainer(strategy="pipeline", strategy_args=options, max_epochs=1, enable_progress_bar=False)
    try:
        trainer.fit(module, Data())
    except EngineError as error:
        Path(folder, str(trainer.world.rank)).write_text(f"{type(error).__name__}: {error}")
        raise


@pytest.mark.parametrize("stage", range(3))
def test_an_error_in_a_layer_ends_every_stage_and_is_shown(stage: int, tmp_path: Path) -> None:
    codes = run_ranks(fails_at, stage, str(tmp_path), processes=3)
    said = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    own = said.pop(2 - stage)
    assert own.endswith(f"ValueError: no such number\nraised in layers {stage} to {stage} of sequential_module")
    assert all(words.startswith("WorldError: ") for words in said)
    assert sorted(codes) == [1, 1, 2]
