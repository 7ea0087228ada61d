"""What the engine adds to a training step, with everything on, beside a bare PyTorch loop over the same data.

make bench-steps

Everything on: a run that is kept, a logged loss, the metric log, the account of samples, hooks, the heartbeat and a
snapshot policy that decides at every step. Beside it a `fit` without a run, and one with a snapshot each 100 steps: of
that the training thread's part is counted, and bench-snapshots measures the rest. Rounds
go through all engines, each round in the other direction. Start-up is left out. A step takes what nine of ten steps
take at least: what other work on the machine does is in the rest, as long as a step is short beside a slice of time,
some milliseconds; longer ones want a quiet machine. The mean is of CPU time of the training thread, with what few steps
take, snapshots and the garbage collector, and with what other work does to caches. Waits are those of
the host for a GPU, as far as a machine without one shows them: reads of tensors that the engine takes for a device's.
Lightning has a column where it is installed; it runs with a CSV logger and without checkpoints.
"""

import argparse
import importlib.util
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from support.device_waits import WaitCounter, as_on_a_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Loop, Trainer, TrainingModule

WARM = 100

Net = Callable[[], nn.Module]


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(128, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 128))


def convolutions() -> nn.Module:
    """The net of docs/examples/digits."""
    return nn.Sequential(
        *(nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(48, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(192, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


#: workload -> net, batch size, shape of a sample, steps
WORKLOADS: dict[str, tuple[Net, int, tuple[int, ...], int]] = {
    "BoringModel, batch 1": (lambda: nn.Linear(32, 2), 1, (32,), 2000),
    "BoringModel, batch 32": (lambda: nn.Linear(32, 2), 32, (32,), 2000),
    "MLP of 1M weights, batch 64": (lambda: mlp(900), 64, (128,), 400),
    "digits net, batch 32": (convolutions, 32, (1, 8, 8), 400),
}


class Meter:
    """Times the steps between the first WARM ones and the last, in microseconds."""

    def __init__(self, steps: int, counter: WaitCounter | None = None) -> None:
        self.steps, self.count, self.counter = steps, 0, counter
        self.waits = 0
        self.cpu_us = self.step_us = 0.0
        self._starts = np.zeros(steps, np.int64)  # part of the module's state: to note a step must not make it grow

    def step(self) -> None:
        """Count a step, at its start."""
        self._starts[self.count] = time.perf_counter_ns()
        self.count += 1
        if self.counter is not None and self.count in (WARM, self.steps):
            self.waits = self.counter.total - self.waits
        if self.count == WARM:
            self._began_s = time.thread_time()
        elif self.count == self.steps:
            self.cpu_us = (time.thread_time() - self._began_s) / (self.steps - WARM) * 1e6
            self.step_us = float(np.quantile(np.diff(self._starts[WARM - 1 :]), 0.1)) / 1e3


class Module(TrainingModule):
    def __init__(self, net: nn.Module, meter: Meter) -> None:
        super().__init__()
        self.net, self._meter = net, meter

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._meter.step()
        loss = self.net(batch[0]).square().mean()
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def bare(net: nn.Module, data: DataLoader[Any], meter: Meter) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for (x,) in data:
        meter.step()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def without_a_run(net: nn.Module, data: DataLoader[Any], meter: Meter) -> None:
    Trainer(max_epochs=1, enable_progress_bar=False).fit(Module(net, meter), data)


def ours(
    net: nn.Module, data: DataLoader[Any], meter: Meter, snapshots: Mapping[str, int] = {"every_seconds": 3600}
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(max_epochs=1, snapshots=snapshots, enable_progress_bar=False)
        trainer.fit(Module(net, meter), data, run=folder)


def own_loop(net: nn.Module, data: DataLoader[Any], meter: Meter) -> None:
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(folder, snapshots={"every_seconds": 3600}, enable_progress_bar=False)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        loop.keep(net=net, optimizer=optimizer)
        train = loop.loader(data)
        for _ in loop.epochs(1):
            for (x,) in train:
                meter.step()
                loss = net(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                loop.log("train/loss", loss)
        loop.close()


def lightning(net: nn.Module, data: DataLoader[Any], meter: Meter) -> None:
    import lightning
    from lightning.pytorch.loggers import CSVLogger

    class Boring(lightning.LightningModule):
        training_step = Module.training_step
        configure_optimizers = Module.configure_optimizers

    module = Boring()
    module.net, module._meter = net, meter
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(max_epochs=1, logger=CSVLogger(folder), log_every_n_steps=1, **quiet)
        trainer.fit(module, data)


Engine = Callable[[nn.Module, DataLoader[Any], Meter], None]
ENGINES: dict[str, Engine] = {
    "bare": bare,
    "midstride, no run": without_a_run,
    "midstride": ours,
    "midstride, a loop of one's own": own_loop,
    "midstride, a snapshot each 100 steps": partial(ours, snapshots={"every_steps": 100}),
}
if importlib.util.find_spec("lightning") is not None:
    ENGINES["lightning"] = lightning
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")


def waits_a_step(make: Net, batch: int, shape: tuple[int, ...], steps: int) -> float:
    """How often the host would wait for a GPU in a step: tensors are taken for a device's, and reads are counted."""
    steps = min(steps, 3 * WARM)
    with as_on_a_device(), WaitCounter() as counter:
        meter = Meter(steps, counter)
        data = DataLoader(TensorDataset(torch.randn(steps * batch, *shape)), batch, shuffle=True)
        ours(make(), data, meter)
    return meter.waits / (steps - WARM)


def measured(engine: Engine, make: Net, batch: int, shape: tuple[int, ...], steps: int) -> Meter:
    meter = Meter(steps)
    data = DataLoader(TensorDataset(torch.randn(steps * batch, *shape)), batch, shuffle=True)
    engine(make(), data, meter)
    return meter


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    table = Table("workload", "engine", "us a step", "adds us", "ratio", "from-to", "mean", "waits a step")
    table.title = f"median of {rounds} interleaved rounds; a step: its first decile; mean: ratio of CPU time"
    for name, workload in WORKLOADS.items():
        found: dict[str, list[Meter]] = {engine: [] for engine in ENGINES}
        for number in range(rounds):
            for engine in list(ENGINES)[:: -1 if number % 2 else 1]:
                found[engine].append(measured(ENGINES[engine], *workload))
        alone = statistics.median(meter.step_us for meter in found["bare"])
        for engine, meters in found.items():
            mine = statistics.median(meter.step_us for meter in meters)
            pairs = list(zip(found["bare"], meters, strict=True))
            ratios = sorted(b.step_us / a.step_us for a, b in pairs)
            spread = f"{ratios[0]:.2f}-{ratios[-1]:.2f}"
            mean = f"{statistics.median(b.cpu_us / a.cpu_us for a, b in pairs):.2f}"
            waits = f"{waits_a_step(*workload):g}" if engine == "midstride" else ""
            cells = f"{mine:.0f}", f"{mine - alone:.0f}", f"{statistics.median(ratios):.3f}", spread, mean, waits
            table.add_row(name if engine == "bare" else "", engine, *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
