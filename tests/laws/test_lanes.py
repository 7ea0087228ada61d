"""Lanes: one, two and four ranks, and chains of them over snapshots, end with the same bits and the same metric log."""

import os
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from laws.lives import Samples
from laws.plain_lanes import BATCH, EPOCHS, LANES, NETS, SAMPLES, SEED, plain_lanes
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from midstride.engine import BestCheckpoint, EarlyStopping, LearningRateMonitor, Trainer, TrainingModule
from midstride.engine.errors import NotExact
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.runs.audit import audit
from midstride.engine.state.differences import differences
from midstride.engine.testing import run_ranks


class Lit(TrainingModule):
    """One of the oracle's nets as a module."""

    def __init__(self, net: str) -> None:
        super().__init__()
        self.net = NETS[net]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, _ = batch
        loss = cross_entropy(self.net(x), y)
        self.log("train/loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Watched(Lit):
    """Everything that is logged, seen and drawn decides how it goes on."""

    def __init__(self, net: str) -> None:
        super().__init__(net)
        self.mean, self.cat = torchmetrics.MeanMetric(), torchmetrics.CatMetric()
        self.both = torchmetrics.MetricCollection([torchmetrics.SumMetric(), torchmetrics.MaxMetric()])
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mine", loss)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)
        self.mean.update(loss.detach())
        self.both.update(loss.detach() / 3)
        self.log("train/mean", self.mean)
        self.log_dict({name: metric for name, metric in self.both.items(keep_base=True, copy_state=False)})
        if float(loss) > 1.05:
            self.log("now and then", float(loss) + random.random(), sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps += 1
        self.log("drawn", random.random() + self.steps, sync_dist=True, reduce_fx="sum")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, _ = batch
        loss = cross_entropy(self.net(x + torch.randn_like(x)), y)
        self.log("val/loss", loss, sync_dist=True)
        self.cat.update(loss)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("val/drawn", random.random() + batch_idx, sync_dist=True)  # the last batch is of two lanes alone

    def on_validation_epoch_end(self) -> None:
        seen = self.cat.compute()
        assert len(seen) == 10  # 26 samples in four lanes, in batches of 3
        self.log("val/spread", float(seen.std()))
        self.cat.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val/loss"}}


@dataclass(frozen=True)
class Row:
    """A module in lanes.

    Args:
        net: one of the oracle's.
        sizes: ranks of each attempt but the last, which are killed one after the other.
        module: what is trained.
        options: for the Trainer.
        oracle: arguments of the oracle; None where it knows too little.
    """

    net: str
    sizes: tuple[int, ...]
    module: type[Lit] = Lit
    options: tuple[tuple[str, Any], ...] = ()
    oracle: tuple[tuple[str, Any], ...] | None = ()


ROWS = {
    "dropout": Row("Dropped", (4, 2, 1, 4)),
    "convolutions": Row("Convolved", (1, 4)),
    "recurrent": Row("Recurrent", (4, 1)),
    "derived": Row("Derived", (4, 1)),
    "unused": Row("Choosing", (2, 4)),
    "windows": Row(
        "Dropped",
        (4, 2),
        options=(("accumulate_grad_batches", 2), ("gradient_clip_val", 0.2)),
        oracle=(("window", 2), ("clip", 0.2)),
    ),
    "bf16": Row("Dropped", (1, 2), options=(("precision", "bf16"),), oracle=(("bf16", True),)),
    "watched": Row("Dropped", (2, 4, 2), module=Watched, oracle=None),
}
#: where the attempts of a chain die: (step, phase)
DEATHS = [(2, "forward"), (4, "validation"), (7, "backward"), (9, "snapshot_write")]


def train(folder: str, row: Row, lanes: int | None = LANES) -> None:
    callbacks: list[Any] = [LearningRateMonitor()]
    options: dict[str, Any] = {"strategy": "ddp", "lanes": lanes, **dict(row.options)}
    data = [DataLoader(Samples(SAMPLES, noise=0.0 if row.oracle is not None else 0.1), BATCH, shuffle=True)]
    if row.module is Watched:
        callbacks += [BestCheckpoint("val/loss"), EarlyStopping("val/loss", patience=3)]
        options["val_check_interval"] = 2
        data.append(DataLoader(Samples(26), 3))
    trainer = Trainer(
        seed=SEED,
        max_epochs=EPOCHS,
        snapshots={"every_steps": 1},
        callbacks=callbacks,
        enable_progress_bar=False,
        **options,
    )
    module = row.module(row.net)
    trainer.fit(module, *data, run=f"{folder}/run")
    state = {"weights": module.net.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}
    torch.save(state, f"{folder}/rank-{trainer.world.rank}.pt")


def end_of(folder: Path, ranks: int) -> Any:
    """Return the state with which every rank ended, which is one."""
    states = [torch.load(folder / f"rank-{rank}.pt") for rank in range(ranks)]
    assert not any(differences(states[0], other) for other in states[1:])
    return states[0]


def chain(folder: Path, row: Row, last: int) -> None:
    """Let a run die in each of its sizes, and end in the last."""
    folder.mkdir()
    plan = FaultPlan(folder)
    for ranks, (step, phase) in zip(row.sizes, DEATHS, strict=False):
        phase = phase if phase != "validation" or row.module is Watched else "optimizer_step"
        plan.add("kill", rank=ranks - 1, step=step, phase=phase)
    for ranks in row.sizes:
        codes = run_ranks(train, str(folder), row, processes=ranks, environment={**os.environ, **plan.environment})
        assert codes[-1] == -9, codes
    plan.assert_all_fired()
    assert run_ranks(train, str(folder), row, processes=last) == [0] * last


@pytest.mark.parametrize("name", ROWS)
def test_any_number_of_ranks_computes_the_same_run_in_lanes(name: str, tmp_path: Path) -> None:
    row, last = ROWS[name], 1 if name == "watched" else ROWS[name].sizes[0] // 2 or 2
    alone = 2 if row.oracle is None else 1
    (tmp_path / "alone").mkdir()
    assert run_ranks(train, str(tmp_path / "alone"), row, processes=alone) == [0] * alone
    chain(tmp_path / "chain", row, last)
    expected, found = end_of(tmp_path / "alone", alone), end_of(tmp_path / "chain", last)
    assert not differences(expected, found)
    logs = [(tmp_path / folder / "run/metrics.csv").read_bytes() for folder in ("alone", "chain")]
    assert logs[0] == logs[1]
    assert audit(str(tmp_path / "chain/run")).is_clean
    if row.oracle is not None:
        assert not differences(plain_lanes(NETS[row.net], **dict(row.oracle)), found)


def test_more_ranks_resume_a_finished_run(tmp_path: Path) -> None:
    log = tmp_path / "run/metrics.csv"
    assert run_ranks(train, str(tmp_path), ROWS["dropout"], processes=1) == [0]
    ended = log.read_bytes()
    assert run_ranks(train, str(tmp_path), ROWS["dropout"], processes=4) == [0] * 4
    assert log.read_bytes() == ended


def test_without_lanes_four_ranks_have_other_sums(tmp_path: Path) -> None:
    row = Row("Recurrent", ())
    assert run_ranks(train, str(tmp_path), row, None, processes=LANES) == [0] * LANES
    assert differences(plain_lanes(NETS["Recurrent"])["weights"], end_of(tmp_path, LANES)["weights"])


class Cools(Lit):
    """Changes an attribute now and then."""

    temperature = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 3 == 2:
            self.temperature *= 0.8
        return super().training_step(batch, batch_idx) / self.temperature


class Remembers(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.newest = super().training_step(batch, batch_idx)
        return self.newest


class CountsInValidation(Lit):
    def __init__(self, net: str) -> None:
        super().__init__(net)
        self.register_buffer("seen", torch.zeros(()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen += 1


#: module -> what it changes
CHANGES: dict[type[Lit], str] = {
    Cools: r"Cools.training_step changes module.*temperature",
    Remembers: r"Remembers.training_step changes module.*newest",
    CountsInValidation: r"CountsInValidation.validation_step changes the buffer seen",
}


def change(folder: str) -> None:
    """Train each of them, and note how it is refused."""
    data, rank = [DataLoader(Samples(SAMPLES), BATCH), DataLoader(Samples(26), 3)], os.environ["RANK"]
    for kind in CHANGES:
        try:
            Trainer(strategy="ddp", lanes=LANES, max_epochs=1, enable_progress_bar=False).fit(kind("Dropped"), *data)
        except NotExact as error:
            Path(folder, f"refused-{kind.__name__}-{rank}").write_text(str(error))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_state_that_depends_on_the_rank_of_a_lane_is_refused(ranks: int, tmp_path: Path) -> None:
    assert run_ranks(change, str(tmp_path), processes=ranks) == [0] * ranks
    for kind, words in CHANGES.items():
        for rank in range(ranks):
            assert re.match(words, (tmp_path / f"refused-{kind.__name__}-{rank}").read_text())
