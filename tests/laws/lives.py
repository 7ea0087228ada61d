"""A small run with everything in it that is easily lost, and its lives: attempts in a world of forked ranks."""

import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from midstride.engine import (
    BestCheckpoint,
    Callback,
    DataModule,
    EarlyStopping,
    LearningRateMonitor,
    Trainer,
    TrainingModule,
)
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.runs.audit import Audit, audit
from midstride.engine.session.replay_plan import ReplayPlan
from midstride.engine.snapshots.reader import weights_at
from midstride.engine.state.differences import differences
from midstride.engine.storage.store import Store
from midstride.engine.testing import final_state, run_ranks

STEPS = 12
BATCH = 4


class Samples(Dataset[tuple[Tensor, int, int]]):
    """Fixed features, with noise drawn from every generator at each reading unless `noise` is 0."""

    def __init__(self, samples: int, noise: float = 0.1) -> None:
        self.features = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1))
        self.noise = noise

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        features = self.features[index]
        if self.noise:
            features = features + self.noise * (torch.randn(6) + random.gauss(0, 1) + float(np.random.normal()))
        return features, index % 3, index


class Tangled(TrainingModule):
    """Registration order is not use order; dropout and batch norm; one parameter for two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, 3)
        self.first = nn.Linear(6, 40)
        self.middle = nn.Linear(40, 5)
        self.norm = nn.BatchNorm1d(20)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        # Two values a channel: a strategy may split a batch down to single samples.
        normed = self.norm(self.first(x).view(-1, 20, 2)).flatten(1)
        return self.last(torch.relu(self.middle(self.drop(torch.relu(normed)))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, index = batch
        note_samples(self, index)
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train/loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, _ = batch
        self.log("val/loss", nn.functional.cross_entropy(self(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 5], gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def note_samples(module: TrainingModule, index: Tensor) -> None:
    """Note which samples reached the training step, once per life and batch."""
    if journal := os.environ.get("LAWS_JOURNAL"):
        batch = [module.global_rank, module.trainer.progress.epoch, module.trainer.progress.batch]
        if getattr(module, "_is_replica", False):  # one of several parts of the batch
            batch.append(int(index[0]))
        with Path(journal).open("a") as file:
            file.write(json.dumps([batch, index.tolist()]) + "\n")


class SampleData(DataModule):
    """Six uneven batches of training data a rank, and validation data that no number of ranks divides."""

    def __init__(self, ranks: int, workers: int, validation: Sequence[int] = (7,)) -> None:
        self.ranks = ranks
        self.training = Samples(6 * BATCH * ranks - 2)
        self.validation = [Samples(samples, noise=0.0) for samples in validation]
        self.workers = workers

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.training, batch_size=BATCH, shuffle=True, num_workers=self.workers)

    def val_dataloader(self) -> list[DataLoader[Any]]:
        return [DataLoader(samples, batch_size=2) for samples in self.validation]


@dataclass(frozen=True)
class Setting:
    """How the run is trained; every field may change the final bits.

    Args:
        ranks: 1 trains with `single`, more with `ddp`.
        layout: what stands where: see `LAYOUTS`.
        workers: of the training loader.
        options: for the Trainer.
        module: what is trained.
        patience: of early stopping.
        validation: samples of each validation loader.
        data: what it is trained on; `laws.loaders` has kinds of it.
        callbacks: make callbacks, beside those that every run has.
    """

    ranks: int = 1
    layout: str = "plain"
    workers: int = 0
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    module: type[TrainingModule] = Tangled
    patience: int = 100
    validation: tuple[int, ...] = (7,)
    data: Callable[..., SampleData] = SampleData
    callbacks: tuple[Callable[[], Callback], ...] = ()

    def train(self, run: str) -> None:
        """Train to the end, from wherever `run` stands; called in each rank."""
        # Ranks that a launcher started are ddp, also one alone.
        strategy = {"strategy": "single"} if self.ranks == 1 else {}
        options = {"max_epochs": 2, "val_check_interval": 0.5, **strategy, **LAYOUTS[self.layout], **self.options}
        callbacks = [
            BestCheckpoint("val/loss"),
            EarlyStopping("val/loss", patience=self.patience),
            LearningRateMonitor(),
            *(make() for make in self.callbacks),
        ]
        trainer = Trainer(seed=7, callbacks=callbacks, enable_progress_bar=False, **options)
        trainer.fit(self.module(), self.data(self.ranks, self.workers, self.validation), run=run)


LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {"snapshots": {"every_steps": 2}},
    "every step": {"snapshots": {"every_steps": 1}},
    "epoch ends": {"snapshots": {"every_steps": 6}},
    # windows of 4 and 2 batches, with a validation after the third batch, inside the first window
    "accumulation": {"snapshots": {"every_steps": 1}, "accumulate_grad_batches": 4},
}


def live(setting: Setting, folder: Path, plan: FaultPlan | ReplayPlan | None = None) -> list[int]:
    """Give the run in `folder` one life; return its ranks' exit codes."""
    environment = {**os.environ, "LAWS_JOURNAL": str(folder / "journal.jsonl")}
    if plan is not None:
        environment |= plan.environment
    start = run_ranks
    if setting.options.get("strategy") == "horovod":
        from laws.horovod_world import run_horovod_ranks as start
    if setting.options.get("strategy") == "xla":
        from laws.xla_world import run_xla_ranks as start
    return start(setting.train, str(folder / "run"), processes=setting.ranks, environment=environment)


def live_on(setting: Setting, folder: Path, plan: FaultPlan) -> None:
    """Give the run lives until one ends as it should; in each of the others, a kill of `plan` strikes."""
    fired = 0
    while (codes := live(setting, folder, plan)) != [0] * setting.ranks:
        assert -9 in codes, f"ranks ended with {codes}"
        assert fired < (fired := len(plan.fired())), "a rank was killed, and not by the plan"
    plan.assert_all_fired()


def assert_alike(found: Path, expected: Path, run: str | None = None) -> None:
    """Compare two finished runs: state of every rank, best and last weights, metric log and order of samples.

    The one in the folder `found` may have been kept elsewhere, at `run`.
    """
    assert_runs_alike(run or str(found / "run"), str(expected / "run"))
    assert journal(found) == journal(expected)


def assert_runs_alike(ours_at: str, theirs_at: str, weights: Sequence[str] = ("best", "last")) -> None:
    """Compare two finished runs, but for the order of samples in their journals."""
    pairs = zip(final_state(ours_at), final_state(theirs_at), strict=True)
    for rank, (ours, theirs) in enumerate(pairs):
        paths = differences(ours, theirs)
        assert not paths, f"rank {rank}: {paths}"
    ours, theirs = (Store.open(url).read("metrics.csv") for url in (ours_at, theirs_at))
    assert ours == theirs
    for folder in weights:
        ours, theirs = (vars(weights_at(f"{url}/{folder}")) for url in (ours_at, theirs_at))
        assert not differences(ours, theirs), f"{folder}: {differences(ours, theirs)}"
    account = audit(ours_at)
    assert account.is_clean, account
    assert uncounted(account) == replace(uncounted(audit(theirs_at)), snapshot=account.snapshot)


def uncounted(account: Audit) -> Audit:
    """Return what a run used, without its parent and what is known only of one not resumed: see `test_streams`."""
    return replace(account, parent="", epochs=tuple(replace(epoch, is_counted=True) for epoch in account.epochs))


def journal(folder: Path) -> dict[str, list[int]]:
    """Return which samples each rank trained on in each batch; lives that saw a batch twice saw the same samples."""
    batches: dict[str, list[int]] = {}
    for line in (folder / "journal.jsonl").read_text().splitlines():
        batch, samples = json.loads(line)
        assert batches.setdefault(str(batch), samples) == samples, f"batch {batch} had other samples in another life"
    return batches
