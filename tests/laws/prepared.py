"""Loops over what accelerate and Lightning Fabric have prepared, undisturbed and killed, in forks of one process."""

import importlib
import json
import os
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Loop
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.processes.child_processes import ChildProcesses
from midstride.engine.processes.loopback import rank_environments
from midstride.engine.session.private_file import AnonymousFile
from midstride.engine.world import World

#: where each run dies: after how many steps, and in which phase
DEATHS = ((4, "after_step"), (12, "fetch"))


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
            codes = [life(calm, name, folder / name / "undisturbed", ranks)]
            for step, phase in DEATHS:
                plan.add("kill", step=step, phase=phase, rank=ranks - 1)
            codes += [life(plan, name, folder / name / "killed", ranks) for _ in range(len(DEATHS) + 1)]
            plan.assert_all_fired()
            told: dict[str, Any] = {"codes": codes}
        except BaseException:
            told = {"error": traceback.format_exc()}
        (folder / f"{name}.json").write_text(json.dumps(told))


def life(plan: FaultPlan, name: str, folder: Path, ranks: int) -> list[int]:
    """Train in forks, one for each rank, under `plan`; return how they ended."""
    meeting, alone = AnonymousFile(), {**os.environ, **plan.environment}
    environments = [alone] if ranks == 1 else rank_environments(ranks, meeting.path, base=alone)
    with ChildProcesses(train, [name, folder], environments) as processes:
        while processes.running():
            processes.wait(60.0)
        return [code or 0 for code in processes.exit_codes()]


def train(name: str, folder: Path) -> None:
    """Train from wherever the run in `folder` stands, and write what it ends with."""
    make, ranks = ROWS[name]
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


#: what prepares the loop, and for how many ranks
ROWS: dict[str, tuple[Callable[..., None], int]] = {
    "accelerate": (with_accelerate, 1),
    "accelerate on 3 ranks": (with_accelerate, 3),
    "fabric": (with_fabric, 1),
    "fabric on 3 ranks": (with_fabric, 3),
}
