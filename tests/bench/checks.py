"""What `verify_every` costs: the CPU time of a step executed twice, beside that of the steps around it.

make bench-checks

Both are taken in one fit, so that other work on the machine is in both. "steps" is how many steps a check takes in
addition to its own; a thousandth of that is the cost of `verify_every: 1000`.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from bench.steps import WORKLOADS
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Trainer, TrainingModule
from midstride.engine.training.step_check import StepCheck

#: steps between two checks, and those of a fit
EVERY, STEPS, WARM = 10, 600, 100


class Module(TrainingModule):
    def __init__(self, net: nn.Module, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        self.net, self._optimizer = net, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return self._optimizer(self.parameters(), lr=1e-3)


@contextmanager
def timed() -> Iterator[list[float]]:
    """Yield a list that gets the CPU seconds of each step in the block."""
    train, taken = StepCheck.train, list[float]()

    def timing(check: StepCheck, batch: Any, index: int) -> Any:
        began_s = time.process_time()
        try:
            return train(check, batch, index)
        finally:
            taken.append(time.process_time() - began_s)

    StepCheck.train = timing  # type: ignore[method-assign]
    try:
        yield taken
    finally:
        StepCheck.train = train  # type: ignore[method-assign]


def measured(workload: str, optimizer: Callable[..., torch.optim.Optimizer]) -> tuple[float, float]:
    """Return the CPU seconds of a step, and those that a check adds to it."""
    make, batch_size, shape, _ = WORKLOADS[workload]
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(batch_size * STEPS, *shape)), batch_size)
    with tempfile.TemporaryDirectory() as folder, timed() as taken:
        trainer = Trainer(
            max_epochs=1, snapshots={"every_seconds": 3600}, verify_every=EVERY, enable_progress_bar=False, seed=0
        )
        trainer.fit(Module(make(), optimizer), loader, run=folder)
    checks = [one for number, one in enumerate(taken, 1) if number > WARM and number % EVERY == 0]
    others = [one for number, one in enumerate(taken, 1) if number > WARM and 1 < number % EVERY < EVERY - 1]
    step_s = statistics.median(others)
    return step_s, statistics.median(checks) - step_s


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-checks", description=__doc__.splitlines()[0])
    parser.add_argument("-k", metavar="WORD", default="", help="workloads with this in their name")
    chosen = parser.parse_args().k
    torch.set_num_threads(1)
    table = Table("workload", "optimizer", "step, ms", "a check adds, ms", "steps", "verify_every: 1000")
    for workload in WORKLOADS:
        if chosen not in workload:
            continue
        for optimizer in (torch.optim.SGD, torch.optim.AdamW):
            step_s, check_s = measured(workload, optimizer)
            ratio = check_s / step_s
            cells = f"{step_s * 1e3:.2f}", f"{check_s * 1e3:.2f}", f"{ratio:.1f}", f"{ratio / 10:.2f} %"
            table.add_row(workload, optimizer.__name__, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
