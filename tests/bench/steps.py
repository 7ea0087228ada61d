"""What the engine adds to a step, with everything on, against a bare PyTorch loop over the same data: interleaved runs.

make bench-steps
"""

import statistics
import tempfile
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Trainer, TrainingModule

STEPS = 2000
ROUNDS = 5

NETS = {
    "BoringModel, batch 1": (lambda: nn.Linear(32, 2), 1, 32),
    "BoringModel, batch 32": (lambda: nn.Linear(32, 2), 32, 32),
    "MLP of 70k weights, batch 32": (
        lambda: nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)),
        32,
        128,
    ),
}


class Module(TrainingModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def loader(batch: int, width: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(STEPS * batch, width)), batch, shuffle=True)


def bare(net: nn.Module, data: DataLoader[Any]) -> float:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    began = time.perf_counter()
    for (x,) in data:
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - began) / STEPS * 1e6


def ours(net: nn.Module, data: DataLoader[Any], folder: str) -> float:
    trainer = Trainer(max_epochs=1, snapshots={"every_steps": 10 * STEPS}, enable_progress_bar=False)
    began = time.perf_counter()
    trainer.fit(Module(net), data, run=folder)
    return (time.perf_counter() - began) / STEPS * 1e6


def main() -> None:
    """Print microseconds a step, and what the engine adds."""
    torch.set_num_threads(1)
    table = Table("workload", "bare us/step", "midstride us/step", "adds us", "ratio")
    table.title = f"{STEPS} steps, best of {ROUNDS}"
    for name, (make, batch, width) in NETS.items():
        rounds: list[tuple[float, float]] = []
        for _ in range(ROUNDS):
            with tempfile.TemporaryDirectory() as folder:
                rounds.append((bare(make(), loader(batch, width)), ours(make(), loader(batch, width), folder)))
        alone, with_engine = (min(column) for column in zip(*rounds, strict=True))
        ratio = statistics.median(b / a for a, b in rounds)
        row = f"{alone:.0f}", f"{with_engine:.0f}", f"{with_engine - alone:.0f}", f"{ratio:.2f}"
        table.add_row(name, *row)
    Console().print(table)


if __name__ == "__main__":
    main()
