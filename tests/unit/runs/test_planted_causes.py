"""`midstride diff` names planted causes: each is found at its step, in the order of cause."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from midstride.engine import Trainer, TrainingModule
from midstride.engine.runs.first_cause import Cause, first_cause
from midstride.engine.runs.replay import replay_environment
from midstride.engine.session.replay_plan import TRACE, ReplayPlan
from midstride.engine.training.step_replay import ReplayEnd

Act = Callable[["Net"], object]
#: steps traced, and the step at which a cause is planted
STEPS, AT = 5, 3


class Samples(Dataset[Tensor]):
    def __init__(self, changed: int = -1) -> None:
        self.x = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
        if changed >= 0:
            self.x[changed] += 1e-6

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return self.x[index]


class Order:
    def __init__(self, swapped: bool) -> None:
        self.order = list(range(40))
        if swapped:  # in the third batch
            self.order[9], self.order[30] = 30, 9

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)

    def __len__(self) -> int:
        return 40


class Net(TrainingModule):
    def __init__(self, hook: str = "", act: Act = lambda module: None, lr: float = 0.1, dropout: float = 0.5) -> None:
        super().__init__()
        self.hook, self.act, self.lr = hook, act, lr
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(dropout), nn.Linear(4, 1))
        if hook == "init":
            act(self)

    def _plant(self, hook: str) -> None:
        if hook == self.hook and self.global_step == AT - (hook != "batch end"):
            self.act(self)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batch = batch
        self._plant("batch start")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.scale = 1.0
        self._plant("step")
        loss: Tensor = self.net(batch).pow(2).mean() * self.scale
        return loss

    def on_after_backward(self) -> None:
        self._plant("after backward")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._plant("batch end")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def put(name: str, value: float) -> Act:
    return lambda module: setattr(module, name, value)


def first_of(module: Net) -> Tensor:
    return module.net[3].weight.detach()


def state(module: Net) -> dict[str, Any]:
    (optimizer,) = module.trainer.optimizers
    return dict(optimizer.state[module.net[3].weight])


def set_lr(module: Net) -> None:
    module.trainer.optimizers[0].param_groups[0]["lr"] = 0.2


#: cause -> how it is planted, and the step, kind and name by which it is found
CAUSES: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "another seed": ({"seed": 4}, 0, "weight", "net.0.weight"),
    "one initial weight": (
        {"hook": "init", "act": lambda module: first_of(module)[0, 1].add_(1)},
        0,
        "weight",
        "net.3",
    ),
    "another buffer at first": ({"hook": "init", "act": lambda m: m.net[1].running_mean.add_(1)}, 0, "buffer", "net.1"),
    "another learning rate": ({"lr": 0.2}, 0, "optimizer state", "AdamW, group 0: lr"),
    "one changed sample": ({"changed": 9}, AT, "batch", "batch"),
    "two samples swapped": ({"swapped": True}, AT, "samples", "batch 2"),
    "another batch size": ({"batch_size": 5}, 1, "samples", "batch 0"),
    "a changed batch": ({"hook": "batch start", "act": lambda module: module.batch[0].add_(1)}, AT, "batch", "batch"),
    "a draw of torch": ({"hook": "step", "act": lambda module: torch.rand(1)}, AT, "loss", "loss 0"),
    "a draw after the step": ({"hook": "batch end", "act": lambda m: torch.rand(1)}, AT + 1, "random state", "torch"),
    "a draw of Python": ({"hook": "step", "act": lambda module: random.random()}, AT + 1, "random state", "random"),
    "a draw of numpy": ({"hook": "step", "act": lambda module: np.random.rand()}, AT + 1, "random state", "numpy"),
    "another dropout": ({"dropout": 0.2}, 1, "loss", "loss 0"),
    "a scaled loss": ({"hook": "step", "act": put("scale", 1.001)}, AT, "loss", "loss 0"),
    "a gradient": (
        {"hook": "after backward", "act": lambda m: m.net[3].weight.grad[0].add_(1)},
        AT,
        "gradient",
        "net.3",
    ),
    "clipped gradients": ({"gradient_clip_val": 1e-4}, 1, "optimizer state", "AdamW: exp_avg of net.0.weight"),
    "a moment": (
        {"hook": "batch end", "act": lambda m: state(m)["exp_avg"].add_(1)},
        AT,
        "optimizer state",
        "AdamW: exp_avg",
    ),
    "a schedule": ({"hook": "batch end", "act": set_lr}, AT, "optimizer state", "AdamW, group 0: lr"),
    "one flipped weight": (
        {"hook": "batch end", "act": lambda m: first_of(m)[0, 2].neg_()},
        AT,
        "weight",
        "net.3.weight",
    ),
    "a buffer": (
        {"hook": "batch end", "act": lambda m: m.net[1].running_var.add_(1)},
        AT,
        "buffer",
        "net.1.running_var",
    ),
}


def trace(
    folder: Path, *, seed: int = 3, changed: int = -1, swapped: bool = False, batch_size: int = 4, **planted: Any
) -> list[list[dict[str, Any]]]:
    """Return the trace of the first steps of a training."""
    options = {name: planted.pop(name) for name in ("gradient_clip_val",) if name in planted}
    folder.mkdir()
    plan = ReplayPlan(str(folder), STEPS, trace=True)
    with replay_environment(plan):
        trainer = Trainer(max_epochs=1, seed=seed, enable_progress_bar=False, snapshots=None, **options)
    loader = DataLoader(Samples(changed), batch_size=batch_size, sampler=Order(swapped))
    module = Net(**planted)
    with pytest.raises(ReplayEnd):
        trainer.fit(module, loader)
    return [json.loads((folder / TRACE.format(rank=0)).read_text())]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    return trace(tmp_path_factory.mktemp("plain") / "trace")


@pytest.mark.parametrize("cause", CAUSES)
def test_a_planted_cause_is_named(cause: str, plain: list[list[dict[str, Any]]], tmp_path: Path) -> None:
    planted, step, kind, name = CAUSES[cause]
    found = first_cause(plain, trace(tmp_path / "trace", **planted))
    assert isinstance(found, Cause)
    assert (found.step, found.rank, found.kind) == (step, 0, kind), found
    assert found.name.startswith(name), found


def test_two_trainings_that_are_alike(plain: list[list[dict[str, Any]]], tmp_path: Path) -> None:
    assert first_cause(plain, trace(tmp_path / "trace")) is None


def test_the_samples_that_differ_are_named() -> None:
    ours, theirs = ([[{"step": 7, "samples": {"batch 3": f"[1, {index}, 2]"}}]] for index in (1203, 77))
    assert str(first_cause(ours, theirs)) == "step 7, rank 0, samples: batch 3 (at place 1: 1203, and 77)"
