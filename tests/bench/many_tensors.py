"""What snapshots of many small tensors cost a fit, as ratios to torch.save of the same state in the same fit.

Adam keeps three tensors for each parameter, so 10,000 parameters have a state of 40,000 tensors.

make bench-snapshots
"""

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bench.snapshots import has_torchsnapshot, torchsnapshot_take
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Trainer, TrainingModule

PARAMETERS = (100, 1_000, 10_000)
#: steps between two snapshots; torch.save and dcp.async_save are called in the middle
EVERY = 6
#: the first snapshots are not counted: they find the layout of the file, and touch two buffers
WARM = 3


@dataclass
class Times:
    """Seconds in one fit: of its steps, and of others' ways to save the same state."""

    began: float = 0.0
    marks: list[float] = field(default_factory=list)
    save_s: list[float] = field(default_factory=list)
    async_s: list[float] = field(default_factory=list)
    torchsnapshot_s: list[float] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        """Seconds from the call of `fit` to the first step."""
        return self.marks[0] - self.began

    def stalls_s(self) -> list[float]:
        """Return the seconds by which each snapshot made a step longer."""
        steps = [after - before for before, after in zip(self.marks, self.marks[1:], strict=False)]
        usual = statistics.median(seconds for step, seconds in enumerate(steps) if (step + 1) % EVERY in (1, 2))
        return [seconds - usual for step, seconds in enumerate(steps) if (step + 1) % EVERY == 0][WARM:]


class Layers(TrainingModule):
    """Many small layers, of which a step uses a few; every weight has a gradient."""

    def __init__(self, parameters: int, times: Times, folder: Path) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(parameters // 2))
        self._times, self._folder = [times], [folder]
        for parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        step = self.trainer.global_step
        self._times[0].marks.append(time.perf_counter())
        if step % EVERY == 3 and step > EVERY:
            self._save_otherwise()
        x: Tensor = batch[0]
        for layer in [*self.layers][:4]:
            x = layer(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3, foreach=True)

    def _save_otherwise(self) -> None:
        state = {"module": self.state_dict(), "optimizer": self.trainer.optimizers[0].state_dict()}
        began = time.perf_counter()
        torch.save(state, self._folder[0] / "state.pt")
        self._times[0].save_s.append(time.perf_counter() - began)
        if len(self._times[0].async_s) < 2:
            stager = DefaultStager(StagingOptions(False, False, False, False))
            began = time.perf_counter()
            saving: Any = dcp.async_save(state, checkpoint_id=self._folder[0] / "dcp", async_stager=stager)
            self._times[0].async_s.append(time.perf_counter() - began)
            getattr(saving, "upload_completion", saving).result()
            stager.close()
            if has_torchsnapshot():
                began = time.perf_counter()
                wait = torchsnapshot_take(state, self._folder[0] / "torchsnapshot")
                self._times[0].torchsnapshot_s.append(time.perf_counter() - began)
                wait()


def measure(parameters: int, snapshots: int, folder: Path) -> Times:
    """Return the times of one fit with so many snapshots after the first ones."""
    times, steps = Times(), EVERY * (snapshots + WARM) + 2
    trainer = Trainer(
        max_steps=steps,
        seed=1,
        snapshots={"every_steps": EVERY, "keep": 1},
        enable_progress_bar=False,
        strategy="single",
    )
    module = Layers(parameters, times, folder)
    times.began = time.perf_counter()
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(8 * steps, 8)), 8), run=str(folder / f"run-{parameters}"))
    return times


def main() -> None:
    """Print a table with a row for each number of parameters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--snapshots", type=int, default=7)
    parser.add_argument("--parameters", type=int, nargs="*", default=list(PARAMETERS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.optim.Adam(nn.Linear(1, 1).parameters())  # the first one imports for a second
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    others = ["dcp.async_save", *(["torchsnapshot"] if has_torchsnapshot() else [])]
    table = Table("parameters", "first step s", "torch.save ms", "stall / torch.save", "largest", *others)
    table.title = f"median stall of {arguments.snapshots} snapshots, as a multiple of the median of torch.save"
    with tempfile.TemporaryDirectory() as name:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for parameters in arguments.parameters:
            times = measure(parameters, arguments.snapshots, Path(name))
            save_s, stalls_s = statistics.median(times.save_s), times.stalls_s()
            theirs = [min(found) for found in (times.async_s, times.torchsnapshot_s) if found]
            shares = (statistics.median(stalls_s), max(stalls_s), *theirs)
            numbers = (
                f"{times.first_s:.2f}",
                f"{save_s * 1e3:.0f}",
                *(f"{seconds / save_s:.2f}" for seconds in shares),
            )
            table.add_row(f"{parameters:,}", *numbers)
        dist.destroy_process_group()
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
