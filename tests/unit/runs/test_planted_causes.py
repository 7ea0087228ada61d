"""`midstride diff` names planted causes: each is found at its step, in the order of cause."""

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from midstride.engine import Callback, Trainer, TrainingModule
from midstride.engine.checkpointing.identity import environment_of
from midstride.engine.errors import ReplayEnd
from midstride.engine.runs.replay import changes_between, replay_environment
from midstride.engine.runs.run_difference import Cause, first_cause
from midstride.engine.session.replay_plan import TRACE, ReplayPlan
from midstride.engine.storage.store import Store

Act = Callable[["Net"], object]
#: steps traced, and the step at which a cause is planted
STEPS, AT = 5, 3


class Samples(Dataset[Tensor]):
    def __init__(self, changed: int = -1, file: Path | None = None) -> None:
        self.x, self.shift = torch.randn(40, 3, generator=torch.Generator().manual_seed(1)), 0.0
        if changed >= 0:
            self.x[changed] += 1e-6
        if file is not None:  # both have its time and size
            self.x.numpy().tofile(file)
            os.utime(file, (0, 0))
            self.x = torch.from_file(str(file), size=120).view(40, 3)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return self.x[index] + self.shift


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
    def __init__(
        self,
        hook: str = "",
        act: Act = lambda module: None,
        lr: float = 0.1,
        dropout: float = 0.5,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    ) -> None:
        super().__init__()
        self.hook, self.act, self.lr, self.optimizer = hook, act, lr, optimizer
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
        return self.optimizer(self.parameters(), lr=self.lr)


def put(name: str, value: float) -> Act:
    return lambda module: setattr(module, name, value)


def first_of(module: Net) -> Tensor:
    return module.net[3].weight.detach()


def state(module: Net) -> dict[str, Any]:
    (optimizer,) = module.trainer.optimizers
    return dict(optimizer.state[module.net[3].weight])


def set_lr(module: Net) -> None:
    module.trainer.optimizers[0].param_groups[0]["lr"] = 0.2


class Nudge(Callback):
    """Changes a weight after a step."""

    def on_train_batch_end(self, trainer: Any, module: Net, *given: Any) -> None:
        if trainer.global_step == AT:
            first_of(module)[0, 0].add_(1e-6)


def shifted(samples: list[Tensor]) -> Tensor:
    return torch.stack(samples) + 1e-6


def shift(worker: int) -> None:
    torch.utils.data.get_worker_info().dataset.shift = 1e-6  # type: ignore[union-attr]


def scale_gradient(module: Net) -> None:
    module.net[0].bias.register_hook(lambda gradient: gradient * 1.5)


def planted(hook: str, act: Act) -> dict[str, Any]:
    return {"hook": hook, "act": act}


#: cause -> how it is planted, and the step, kind and name by which it is found
CAUSES: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "another seed": ({"seed": 4}, 0, "weight", "net.0.weight"),
    "one initial weight": (planted("init", lambda m: first_of(m)[0, 1].add_(1)), 0, "weight", "net.3"),
    "another buffer at first": (planted("init", lambda m: m.net[1].running_mean.add_(1)), 0, "buffer", "net.1"),
    "another learning rate": ({"lr": 0.2}, 0, "optimizer state", "AdamW, group 0: lr"),
    "one changed sample": ({"changed": 9}, AT, "batch", "batch"),
    "two samples swapped": ({"swapped": True}, AT, "samples", "batch 2"),
    "another batch size": ({"batch_size": 5}, 1, "samples", "batch 0"),
    "a changed batch": (planted("batch start", lambda module: module.batch[0].add_(1)), AT, "batch", "batch"),
    "a draw of torch": (planted("step", lambda module: torch.rand(1)), AT, "loss", "loss 0"),
    "a draw after the step": (planted("batch end", lambda m: torch.rand(1)), AT + 1, "random state", "torch"),
    "a draw of Python": (planted("step", lambda module: random.random()), AT + 1, "random state", "random"),
    "a draw of numpy": (planted("step", lambda module: np.random.rand()), AT + 1, "random state", "numpy"),
    "another dropout": ({"dropout": 0.2}, 1, "loss", "loss 0"),
    "a scaled loss": (planted("step", put("scale", 1.001)), AT, "loss", "loss 0"),
    "a gradient": (planted("after backward", lambda m: m.net[3].weight.grad[0].add_(1)), AT, "gradient", "net.3"),
    "clipped gradients": ({"gradient_clip_val": 1e-4}, 1, "optimizer state", "AdamW: exp_avg of net.0.weight"),
    "a moment": (planted("batch end", lambda m: state(m)["exp_avg"].add_(1)), AT, "optimizer state", "AdamW: exp_avg"),
    "a schedule": (planted("batch end", set_lr), AT, "optimizer state", "AdamW, group 0: lr"),
    "one flipped weight": (planted("batch end", lambda m: first_of(m)[0, 2].neg_()), AT, "weight", "net.3.weight"),
    "a buffer": (planted("batch end", lambda m: m.net[1].running_var.add_(1)), AT, "buffer", "net.1.running_var"),
    "another collate function": ({"collate_fn": shifted}, 1, "batch", "batch"),
    "a worker that is set up otherwise": ({"num_workers": 1, "worker_init_fn": shift}, 1, "batch", "batch"),
    "a file of the same size and time": ({"in_file": True, "changed": 9}, AT, "batch", "batch"),
    "a layer that evaluates": (planted("step", lambda m: m.net[2].eval()), AT, "loss", "loss 0"),
    "another precision": ({"precision": "bf16"}, 1, "loss", "loss 0"),
    "another optimizer": ({"optimizer": torch.optim.Adam}, 0, "optimizer state", "AdamW, group 0: lr"),
    "a callback that changes a weight": ({"callbacks": [Nudge()]}, AT, "weight", "net.3.weight"),
    "a hook of a gradient": (planted("step", scale_gradient), AT, "gradient", "net.0.bias"),
    "a frozen layer": (planted("init", lambda m: m.net[3].requires_grad_(False)), 1, "gradient", "net.3.weight"),
}
#: for the Trainer and for the loader
TRAINER, LOADER = ("gradient_clip_val", "precision", "callbacks"), ("collate_fn", "num_workers", "worker_init_fn")


def trace(
    folder: Path,
    *,
    seed: int = 3,
    changed: int = -1,
    in_file: bool = False,
    swapped: bool = False,
    batch_size: int = 4,
    **changes: Any,
) -> list[list[dict[str, Any]]]:
    """Return the trace of the first steps of a training."""
    options, reading = ({name: changes.pop(name) for name in known if name in changes} for known in (TRAINER, LOADER))
    folder.mkdir()
    file = folder / "samples" if in_file else None
    plan = ReplayPlan(str(folder), STEPS, trace=True)
    with replay_environment(plan):
        trainer = Trainer(max_epochs=1, seed=seed, enable_progress_bar=False, snapshots=None, **options)
    loader = DataLoader(Samples(changed, file), batch_size=batch_size, sampler=Order(swapped), **reading)
    module = Net(**changes)
    with pytest.raises(ReplayEnd):
        trainer.fit(module, loader)
    return [json.loads((folder / TRACE.format(rank=0)).read_text())]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    return trace(tmp_path_factory.mktemp("plain") / "trace")


@pytest.mark.parametrize("cause", CAUSES)
def test_a_planted_cause_is_named(cause: str, plain: list[list[dict[str, Any]]], tmp_path: Path) -> None:
    changes, step, kind, name = CAUSES[cause]
    found = first_cause(plain, trace(tmp_path / "trace", **changes))
    assert isinstance(found, Cause)
    assert (found.step, found.rank, found.kind) == (step, 0, kind), found
    assert found.name.startswith(name), found


def test_two_trainings_that_are_alike(plain: list[list[dict[str, Any]]], tmp_path: Path) -> None:
    assert first_cause(plain, trace(tmp_path / "trace")) is None


#: part of the environment -> its value in the other run, and the line about it
ENVIRONMENTS: dict[str, tuple[Any, str]] = {
    "torch": ("1.13", "torch was 1.13, and is "),
    "numpy": ("1.20", "numpy was 1.20, and is "),
    "threads": (77, "threads was 77, and is "),
    "cpu": ("VSX", "cpu was VSX, and is "),
    "gpu": ("NVIDIA H200", "gpu was NVIDIA H200, and is None"),
    "source": ({Net.__module__: "0"}, "test_planted_causes has changed"),
}


@pytest.mark.parametrize("part", ENVIRONMENTS)
def test_another_environment_is_named(part: str, tmp_path: Path) -> None:
    value, line = ENVIRONMENTS[part]
    now = environment_of([Net], torch.device("cpu"))
    before, after = (Store.open(f"{tmp_path}/{name}") for name in ("before", "after"))
    for store, bits in ((before, {**now, part: value}), (after, now)):
        store.write("run.json", json.dumps({"bits": bits}).encode())
    found = changes_between(before, after)
    assert len(found) == 1, found
    assert line in found[0]


def test_the_samples_that_differ_are_named() -> None:
    ours, theirs = ([[{"step": 7, "samples": {"batch 3": f"[1, {index}, 2]"}}]] for index in (1203, 77))
    assert str(first_cause(ours, theirs)) == "step 7, rank 0, samples: batch 3 (at place 1: 1203, and 77)"
