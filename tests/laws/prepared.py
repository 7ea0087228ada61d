"""Loops over what accelerate and Fabric prepared, and loops as in public scripts: undisturbed and killed, in forks."""

import copy
import importlib
import json
import logging
import os
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from midstride.engine import Loop
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.processes.child_processes import ChildProcesses
from midstride.engine.processes.loopback import rank_environments
from midstride.engine.session.private_file import AnonymousFile
from midstride.engine.world import World

#: where each run dies: after how many steps, and in which phase
DEATHS = ((4, "after_step"), (12, "fetch"), (17, "after_step"))


def live_all(folder: Path) -> None:
    """Give every row its lives; how they ended goes to a file of its name."""
    warnings.simplefilter("ignore")
    for library in ("accelerate", "lightning.fabric"):
        importlib.import_module(library)  # here, and not in each life
    for name in World().environment:
        os.environ.pop(name, None)
    for name, (_, ranks) in ROWS.items():
        try:
            calm, plan = FaultPlan(folder / name / "calm"), FaultPlan(folder / name / "plan")
            codes = [life(calm, train, name, folder / name / "undisturbed", ranks=ranks)]
            for step, phase in DEATHS:
                plan.add("kill", step=step, phase=phase, rank=ranks - 1)
            codes += [life(plan, train, name, folder / name / "killed", ranks=ranks) for _ in range(len(DEATHS) + 1)]
            plan.assert_all_fired()
            told: dict[str, Any] = {"codes": codes}
        except BaseException:
            told = {"error": traceback.format_exc()}
        (folder / f"{name}.json").write_text(json.dumps(told))


def life(plan: FaultPlan, train: Callable[..., object], *arguments: Any, ranks: int) -> list[int]:
    """Train in forks, one for each rank, under `plan`; return how they ended."""
    meeting, alone = AnonymousFile(), {**os.environ, **plan.environment}
    environments = [alone] if ranks == 1 else rank_environments(ranks, meeting.path, base=alone)
    with ChildProcesses(train, arguments, environments) as processes:
        while processes.running():
            processes.wait(60.0)
        return [code or 0 for code in processes.exit_codes()]


class Said(logging.Handler):
    """Collects warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def train(name: str, folder: Path) -> None:
    """Train from wherever the run in `folder` stands, and write what it ends with."""
    make, ranks = ROWS[name]
    said = Said()
    logging.getLogger("midstride").addHandler(said)
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    torch.use_deterministic_algorithms(True)
    loop = Loop(folder / "run", seed=7, snapshots={"every_steps": 1}, enable_progress_bar=False, accelerator="cpu")
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    drawn = torch.randn(22 * ranks, 4, generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(drawn, drawn.sum(1, keepdim=True)), 2, shuffle=True)
    make(loop, net, optimizer, schedule, data)
    ended = {
        "weights": {key: tensor.clone() for key, tensor in net.state_dict().items()},
        "optimizer": [dict(state) for state in optimizer.state.values()],
        "rates": schedule.get_last_lr(),
        "drawn": torch.get_rng_state(),
        "state": {key: value for key, value in vars(loop.state).items() if isinstance(value, float)},
        "said": said.messages,
    }
    torch.save(ended, folder / f"ended-{loop.rank}.pt")


def with_accelerate(loop: Loop, net: nn.Module, optimizer: Any, schedule: Any, data: Any) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
    loop.keep(model=model, optimizer=optimizer, schedule=schedule, accelerator=accelerator)
    batches = loop.loader(data)
    for _ in loop.epochs(2):
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = (model(x) - y).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            loop.log("train/loss", loss)
            loop.log("stepped", float(accelerator.sync_gradients))


def with_fabric(loop: Loop, net: nn.Module, optimizer: Any, schedule: Any, data: Any) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    ranks = loop.world_size
    strategy = DDPStrategy(process_group_backend="gloo") if ranks > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
    fabric.launch()
    model, optimizer = fabric.setup(net, optimizer)
    loop.keep(model=model, optimizer=optimizer, schedule=schedule)
    batches = loop.loader(data)
    for _ in loop.epochs(2):
        for x, y in batches:
            loss = (model(x) - y).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            loop.log("train/loss", loss)
        schedule.step()


def like_nanogpt(loop: Loop, net: nn.Module, optimizer: Any, schedule: Any, data: Any) -> None:
    """Draws batches itself, accumulates, sets rates by a formula, and evaluates before some steps."""
    x, y = data.dataset.tensors
    model = loop.ddp(net)
    loop.keep(model=model, optimizer=optimizer, schedule=schedule)

    def loss_of_batch() -> torch.Tensor:
        chosen = torch.randint(len(x), (2,))
        return (model(x[chosen]) - y[chosen]).square().mean()

    @torch.no_grad()
    def estimate() -> float:
        net.eval()
        losses = torch.stack([(net(x[:4]) - y[:4]).square().mean() + torch.rand(()) / 9 for _ in range(2)])
        net.train()
        return losses.mean().item()

    loop.state.best = 1e9
    for step in loop.steps(22):
        optimizer.param_groups[0]["lr"] = 0.05 * min(1.0, (step + 1) / 6)
        if step % 5 == 0:
            loop.log("val/loss", held := estimate())
            if held < loop.state.best:
                loop.state.best = held
                loop.save_weights("best")
        for micro in range(3):
            if loop.world_size > 1:
                model.require_backward_grad_sync = micro == 2
            loss = loss_of_batch() / 3
            loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loop.log("train/loss", loss)
        loop.log("best", loop.state.best)


class LikeMinGPT:
    """A trainer with its own DDP and DistributedSampler, which runs an epoch in a method."""

    def __init__(self, loop: Loop, net: nn.Module, optimizer: Any, schedule: Any, data: Any) -> None:
        self.loop, self.optimizer = loop, optimizer
        self.model = nn.parallel.DistributedDataParallel(net) if loop.world_size > 1 else net
        sampler = DistributedSampler(data.dataset) if loop.world_size > 1 else None
        loop.keep(model=self.model, optimizer=optimizer, schedule=schedule)
        self.loader = loop.loader(DataLoader(data.dataset, 2, sampler=sampler, shuffle=sampler is None))
        for epoch in loop.epochs(2):
            self.run_epoch(epoch)
            schedule.step()

    def run_batch(self, x: torch.Tensor, y: torch.Tensor) -> float:
        loss = (self.model(x) - y).square().mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    def run_epoch(self, epoch: int) -> None:
        for number, (x, y) in enumerate(self.loader):
            self.loop.log("train/loss", self.run_batch(x, y))
            self.loop.log("at", epoch * 100 + number)


class Average:
    """A running average, of which timm keeps several in an epoch."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float) -> float:
        self.sum, self.count = self.sum + value, self.count + 1
        return self.sum / self.count


def like_timm(loop: Loop, net: nn.Module, optimizer: Any, schedule: Any, data: Any) -> None:
    """Mixes samples by numpy, accumulates, keeps averages of the weights, and steps by the number of updates."""
    average = copy.deepcopy(net).requires_grad_(False)
    model = loop.ddp(net)
    loop.keep(model=model, optimizer=optimizer, schedule=schedule, average=average)
    loader = loop.loader(data)

    def run_epoch(epoch: int) -> float:
        losses = loop.state.losses = Average()
        updates = epoch * -(-len(loader) // 2) + -(-loader.batch // 2)
        for index, (x, y) in enumerate(loader):
            part = np.random.beta(0.4, 0.4)
            x, y = x * part + x.flip(0) * (1 - part), y * part + y.flip(0) * (1 - part)
            loss = (model(x) - y).square().mean()
            loss.backward()
            mean = losses.update(loss.item())
            if index % 2 and index + 1 != len(loader):
                continue
            updates += 1
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for kept, now in zip(average.parameters(), net.parameters(), strict=True):
                    kept.lerp_(now, 1 / (1 + updates))
            optimizer.param_groups[0]["lr"] = 0.05 / (1 + updates)
            loop.log("train/loss", mean)
            loop.log("updates", updates)
        return losses.sum

    loop.state.best = 1e9
    for epoch in loop.epochs(2):
        loop.log("epoch/loss", loss := run_epoch(epoch))
        loop.state.best = min(loss, loop.state.best)


#: what prepares the loop, and for how many ranks
ROWS: dict[str, tuple[Callable[..., None], int]] = {
    "accelerate": (with_accelerate, 1),
    "accelerate on 3 ranks": (with_accelerate, 3),
    "fabric": (with_fabric, 1),
    "fabric on 3 ranks": (with_fabric, 3),
    "nanoGPT": (like_nanogpt, 1),
    "nanoGPT on 3 ranks": (like_nanogpt, 3),
    "minGPT-ddp on 3 ranks": (LikeMinGPT, 3),
    "timm": (like_timm, 1),
}
