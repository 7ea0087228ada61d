"""Memory of each process of a pipeline, with and without balancing, beside one process that has all layers.

make bench-pipeline

Kept: the bytes of weights, gradients and optimizer state, counted. Peak: the most memory that the process held in a
step of training, as the kernel counts it, beyond what it held before the module was built: that is the layers, and the
activations that wait for their backward pass. The net is one whose first layers have large activations and whose last
ones have large weights.
"""

import argparse
import json
import logging
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Callback, Trainer, TrainingModule
from midstride.engine.testing import run_ranks

BATCH, STEPS = 32, 4

#: row -> processes, options of the Trainer
ROWS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "half of the layers each": (2, {"balance": [17, 18]}),
    'balance="size"': (2, {"balance": "size"}),
    'balance="time"': (2, {"balance": "time"}),
    'balance="size", 8 parts': (2, {"balance": "size", "micro_batches": 8}),
    "the same, gpipe": (2, {"balance": "size", "micro_batches": 8, "schedule": "gpipe"}),
    "the same, checkpoint": (2, {"balance": "size", "micro_batches": 8, "checkpoint": True}),
    'three processes, balance="size"': (3, {"balance": "size"}),
}


class Net(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(
            *(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.Conv2d(128, 128, 3, padding=1), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Conv2d(128, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten()),
            *(layer for _ in range(10) for layer in (nn.Linear(1024, 1024), nn.ReLU())),
            nn.Linear(1024, 10),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.sequential_module(batch[0])

    def training_step_end(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Meter(Callback):
    """Measures the last step, when everything is there."""

    def __init__(self) -> None:
        self.before = _status("VmRSS")
        self.kept = self.peak = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEPS - 1:
            Path("/proc/self/clear_refs").write_text("5")  # forgets the peak

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        state = [t for held in optimizer.state.values() for t in held.values() if isinstance(t, Tensor)]
        tensors = [t for p in module.parameters() for t in (p, p.grad) if t is not None] + state
        self.kept = sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEPS - 1:
            self.peak = _status("VmHWM") - self.before


def _status(name: str) -> int:
    """A number of bytes that the kernel knows of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _train(folder: str, arguments: dict[str, Any]) -> None:
    logging.disable(logging.WARNING)
    meter = Meter()
    strategy: dict[str, Any] = {"strategy": "pipeline", "strategy_args": arguments} if arguments else {}
    trainer = Trainer(max_epochs=1, callbacks=[meter], enable_progress_bar=False, **strategy)
    data = TensorDataset(torch.randn(STEPS * BATCH, 3, 32, 32), torch.randint(0, 10, (STEPS * BATCH,)))
    trainer.fit(Net(), DataLoader(data, BATCH))
    cut = getattr(trainer.strategy, "facts", dict)().get("balance", [35])
    found = {"kept": meter.kept, "peak": meter.peak, "cut": cut}
    Path(folder, f"{trainer.world.rank}.json").write_text(json.dumps(found))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    table = Table("", "layers of each", "kept, MB", "peak, MB", "largest peak")
    table.title = f"{sum(p.numel() for p in Net().parameters()) / 1e6:.1f} M weights under Adam, batches of {BATCH}"
    alone = 0.0
    for name, (ranks, arguments) in ROWS.items():
        with tempfile.TemporaryDirectory() as folder:
            assert run_ranks(_train, folder, arguments, processes=ranks) == [0] * ranks
            found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)][::-1]
        kept, peak = ([rank[key] / 1e6 for rank in found] for key in ("kept", "peak"))
        alone = alone or max(peak)
        table.add_row(
            name,
            *(", ".join(f"{value:.0f}" for value in values) for values in (found[0]["cut"], kept, peak)),
            f"{max(peak) / alone:.0%}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    multiprocessing.freeze_support()
    main()
