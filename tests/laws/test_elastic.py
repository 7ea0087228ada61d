"""Law 3 over worlds of several sizes: the same samples, with the same random numbers, in the same global batches."""

import csv
import json
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from midstride.engine import DataModule, Trainer, TrainingModule
from midstride.engine.errors import EngineError
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.runs.audit import audit
from midstride.engine.testing import run_ranks
from midstride.engine.world import World

#: six global batches, the last one of ten samples, which worlds of different sizes pad differently
GLOBAL, SAMPLES = 12, 70


class Numbers(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(6), index


class Data(DataModule):
    """With the batch size of three ranks, whatever their number, unless told otherwise."""

    def __init__(self, batch_size: int = GLOBAL // 3, evaluated: int = GLOBAL // 3) -> None:
        self.options = {"shuffle": True, "batch_size": batch_size}
        self.evaluated = evaluated

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Numbers(), **self.options)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Numbers(), batch_size=self.evaluated)


def noisy(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in samples]) + torch.rand(6), torch.tensor([index for _, index in samples])


class Noisy(Data):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Numbers(), GLOBAL // 3, collate_fn=noisy)


class Full(Data):
    """Full batches only: of 70 samples 3 ranks make six of 12, two of them from its start, and 2 ranks five."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Numbers(), drop_last=True, **self.options)


class Even(Data):
    """As many samples for each rank, and the rest left out: 3 ranks read 69 of 70, and 2 all of them."""

    def train_dataloader(self) -> DataLoader[Any]:
        world = World.from_environment()
        sampler = DistributedSampler(Numbers(), world.size, world.rank, drop_last=True)
        return DataLoader(Numbers(), self.options["batch_size"], sampler=sampler)


class Bucketed(Data):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Numbers(), batch_sampler=[[i, i + 1] for i in range(0, SAMPLES, 2)])


class Counted(TrainingModule):
    """Logs what does not depend on how samples are cut: sums over them that are whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 1)
        self.total = torchmetrics.SumMetric()
        self.largest = torchmetrics.MaxMetric()
        self.all = torchmetrics.CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, index = batch
        note(self, x, index)
        self.total.update(index)
        self.log("train/total", self.total)
        self.log("train/sum", float(index.sum()), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return self.layer(x).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, index = batch
        for metric in (self.largest, self.all):
            metric.update(index)
        self.log("val/largest", self.largest)
        self.log("val/mean", float(index.float().mean()), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if journal := os.environ.get("JOURNAL"):
            seen = sorted(self.all.compute().tolist())
            self.all.reset()
            with Path(journal).open("a") as file:
                file.write(json.dumps(["validated", seen]) + "\n")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Correlated(Counted):
    """Keeps means and variances, which reductions do not put together."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torchmetrics.PearsonCorrCoef()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, index = batch
        self.total.update(x[:, 0], index.float())
        self.log("train/total", self.total)
        return self.layer(x).square().mean()


class Planned(Counted):
    """Slows down over all steps, by a number that no state holds: the default of a function's argument."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        steps = self.trainer.estimated_stepping_batches
        falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step, steps=steps: 1 - step / steps)
        return [optimizer], [{"scheduler": falling, "interval": "step"}]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)


def note(module: Any, x: Tensor, index: Tensor) -> None:
    if journal := os.environ.get("JOURNAL"):
        progress = module.trainer.progress
        with Path(journal).open("a") as file:
            for row, number in zip(x.tolist(), index.tolist(), strict=True):
                file.write(json.dumps(["trained", progress.epoch, progress.batch, number, row]) + "\n")


def train(run: str, data: DataModule, module: type[TrainingModule], options: dict[str, Any]) -> None:
    warnings = logging.FileHandler(Path(run).parent / f"warnings-{os.environ['RANK']}")
    logging.getLogger("midstride").addHandler(warnings)
    given = {"max_epochs": 2, "val_check_interval": 0.5, "snapshots": {"every_steps": 1}, "strategy": "ddp", **options}
    try:
        Trainer(seed=3, enable_progress_bar=False, **given).fit(module(), data, run=run)
    except EngineError as error:
        Path(run).parent.joinpath(f"error-{os.environ['RANK']}").write_text(str(error))
        raise


def values(folder: Path, *names: str) -> list[tuple[str, ...]]:
    with (folder / "run" / "metrics.csv").open() as file:
        return [tuple(row[name] for name in names) for row in csv.DictReader(file)]


def live(folder: Path, ranks: int, data: DataModule, plan: FaultPlan | None = None, **options: Any) -> list[int]:
    environment = {**os.environ, "JOURNAL": str(folder / "journal.jsonl"), **(plan.environment if plan else {})}
    module = options.pop("module", Counted)
    return run_ranks(train, str(folder / "run"), data, module, options, processes=ranks, environment=environment)


def trained(folder: Path) -> dict[tuple[int, int], Counter[Any]]:
    """Return the samples of every global batch, with what random numbers made of them."""
    batches: dict[tuple[int, int], Counter[Any]] = {}
    for line in (folder / "journal.jsonl").read_text().splitlines():
        what, *rest = json.loads(line)
        if what == "trained":
            epoch, batch, number, row = rest
            batches.setdefault((epoch, batch), Counter())[number, tuple(row)] += 1
    return batches


#: ranks of each life, and where all of them stop: in training, in the middle of a validation, in training again
LIVES = [(3, 1, "forward", 0), (2, 3, "validation", 2), (4, 4, "forward", 0), (3, 8, "backward", 0)]


@pytest.mark.parametrize(
    ("strategy", "shared"), [("ddp", False), ("fully_sharded", False), ("ddp", True)], ids=["ddp", "sharded", "shared"]
)
def test_3_then_2_then_4_ranks_train_on_the_same_global_batches(strategy: str, shared: bool, tmp_path: Path) -> None:
    lives: dict[str, Any] = {"strategy": strategy, **({"global_batch_size": GLOBAL} if shared else {})}
    data = Data(5 if shared else GLOBAL // 3)  # where the global batch is said, the loader's size says nothing
    (tmp_path / "alone").mkdir()
    plan = FaultPlan(tmp_path / "plan")
    for ranks, step, phase, visit in LIVES:
        for rank in range(ranks):  # all of them, so that what was taken is committed
            plan.add("raise", rank=rank, step=step, phase=phase, visit=visit)
        assert live(tmp_path, ranks, data, plan, **lives) == [1] * ranks
        plan.assert_all_fired()
    assert live(tmp_path, 1, data if shared else Data(GLOBAL), **lives) == [0]
    assert live(tmp_path / "alone", 3, Data(), strategy=strategy) == [0] * 3

    resumed = [json.loads(path.read_text())["resumed_from"] for path in sorted((tmp_path / "run/lease").glob("*.json"))]
    assert [name and name[:17] for name in resumed] == [
        None,
        "000000000001-g000",
        "000000000003.0002",
        "000000000004-g000",
        "000000000008-g000",
    ]
    expected, found = trained(tmp_path / "alone"), trained(tmp_path)
    assert expected.keys() == found.keys()
    for (epoch, batch), samples in expected.items():
        if batch < 5:
            assert set(found[epoch, batch]) == set(samples)
    for epoch in range(2):
        assert {number for (e, _), batch in found.items() if e == epoch for number, _ in batch} == set(range(SAMPLES))
    assert audit(str(tmp_path / "run")).is_clean
    told = [line for line in (tmp_path / "warnings-0").read_text().splitlines() if "no multiple of the ranks" in line]
    ends = [("3 ranks", 2, "2 pad", 0), ("2 ranks", 0, "4 pad", 2), ("3 ranks", 2, "1 pad", 0)]  # 4 and 3 pad alike
    assert told == [
        f"{SAMPLES} samples are no multiple of the ranks: {was} padded the last batch of an epoch with {then} samples "
        f"from its start, {now} it with {samples}. From that batch on the run differs"
        for was, then, now, samples in ends
    ]
    assert not any("no multiple" in path.read_text() for path in tmp_path.glob("warnings-[1-9]"))
    validated = {line for line in (tmp_path / "journal.jsonl").read_text().splitlines() if '"validated"' in line}
    assert validated == {json.dumps(["validated", [float(number) for number in range(SAMPLES)]])}
    # The first epoch ended with three ranks, which pad it to 72 samples, the second with one, which need not.
    columns = ("train/total", "train/sum", "val/largest")
    ours, theirs = values(tmp_path, *columns), values(tmp_path / "alone", *columns)
    assert ours[:11] == theirs[:11]
    assert ours[11] == (f"{sum(range(SAMPLES)):.1f}", f"{sum(range(SAMPLES)):.1f}", "69.0")


def test_a_schedule_keeps_the_step_count_of_its_first_world_size(tmp_path: Path) -> None:
    for folder in ("plan", "alone"):
        (tmp_path / folder).mkdir()
    plan = FaultPlan(tmp_path / "plan")
    for rank in range(3):
        plan.add("raise", rank=rank, step=3, phase="forward")
    assert live(tmp_path, 3, Data(), plan, module=Planned) == [1] * 3
    plan.assert_all_fired()
    assert live(tmp_path, 2, Data(), module=Planned) == [0] * 2
    assert live(tmp_path / "alone", 3, Data(), module=Planned) == [0] * 3

    assert len(values(tmp_path, "rate")) == 12
    assert values(tmp_path, "rate") == values(tmp_path / "alone", "rate")


REFUSED: dict[str, tuple[int, DataModule, dict[str, Any], list[str]]] = {
    "a number that does not divide": (5, Data(), {}, ["3 x 4 = 12 samples", "1, 2, 3, 4, 6, 12"]),
    "another batch size": (2, Data(5), {}, ["global_batch_size", "has 12", "has 10"]),
    "another end": (2, Full(), {}, ["3 x 4 = 12 samples", "an epoch would have other batches"]),
    "another end, cut by hand": (2, Full(6), {}, ["3 x 4 = 12 samples", "an epoch would have other batches"]),
    "another rest": (2, Even(), {}, ["3 x 4 = 12 samples", "an epoch would have other batches"]),
    "random collate": (2, Noisy(), {}, ["training loader", "collate_fn draws random numbers"]),
    "a batch sampler": (2, Bucketed(), {}, ["training loader", "list", "go to the ranks as a whole"]),
    "samples of its own": (2, Data(), {"use_distributed_sampler": False}, ["use_distributed_sampler=False"]),
    "a metric": (2, Data(), {"module": Correlated}, ["metric total", "PearsonCorrCoef", "cannot be merged"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_state_that_another_world_size_cannot_restore_is_named(name: str, tmp_path: Path) -> None:
    ranks, data, options, words = REFUSED[name]
    start = type(data)() if name in ("another batch size", "another end, cut by hand") else data
    assert live(tmp_path, 3, start, max_steps=1, **options) == [0] * 3
    before = sorted((tmp_path / "run").rglob("*"))
    assert live(tmp_path, ranks, data, max_steps=2, **options) == [2] * ranks
    for rank in range(ranks):
        text = (tmp_path / f"error-{rank}").read_text()
        for word in words:
            assert word in text
    assert sorted((tmp_path / "run").rglob("*")) == before


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (
            Data(),
            {"global_batch_size": 7},
            "3 ranks cannot share such batches without changing the epoch",
        ),
        (Bucketed(), {"global_batch_size": 6}, "the training loader's batches cannot be set: "),
        (Data(), {"global_batch_size": 6, "lanes": 4}, "global_batch_size 6 with lanes"),
    ],
    ids=["a number that does not divide", "a batch sampler", "lanes"],
)
def test_batches_that_cannot_be_shared_are_named(
    data: DataModule, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    ranks = 2 if "lanes" in options else 3
    assert live(tmp_path, ranks, data, max_steps=1, **options) == [2] * ranks
    assert words in (tmp_path / "error-0").read_text()


def test_a_validation_goes_on_only_where_it_stands(tmp_path: Path) -> None:
    plan = FaultPlan(tmp_path / "plan").add("raise", step=3, phase="validation", visit=2)
    assert live(tmp_path, 1, Data(), plan) == [1]
    plan.assert_all_fired()
    assert live(tmp_path, 1, Data(evaluated=5)) == [2]
    text = (tmp_path / "error-0").read_text()
    assert "in the middle of a validation whose validation 0 loader has batches of 4 samples, here they have 5" in text
    assert live(tmp_path, 1, Data()) == [0]
