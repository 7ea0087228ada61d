"""What the engine costs on a GPU: steps beside a bare loop, snapshots beside a plain copy, memory of a strategy.

make bench-gpu

Rounds are interleaved; figures are medians. With `--cpu`, to try this script, sizes are small and memory is left out.
"""

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Callback, Trainer, TrainingModule

WARM, BATCH = 20, 64


class Stack(TrainingModule):
    """Layers of one width in a row, which a strategy can cut."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        loss: Tensor = self.net(batch[0]).square().mean()
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Return an optimizer that keeps two numbers a weight."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=False)


class Clock(Callback):
    """Times the steps after the first ones; the device has done its work at both ends."""

    def __init__(self, steps: int, synchronize: Callable[[], None]) -> None:
        self._steps, self._synchronize = steps, synchronize
        self.step_s = 0.0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Begin, and end."""
        if batch_idx in (WARM, self._steps - 1):
            self._synchronize()
            self.step_s = (time.perf_counter() - self.step_s) / (1 if batch_idx == WARM else self._steps - 1 - WARM)
            if batch_idx == WARM:
                self.step_s = time.perf_counter()


class Bench:
    """The device, and what is trained on it.

    Args:
        cpu: try the script without a GPU.
    """

    def __init__(self, *, cpu: bool) -> None:
        self.device = torch.device("cpu" if cpu else "cuda:0")
        self.options: dict[str, Any] = {"accelerator": "cpu"} if cpu else {"gpus": [0]}
        self.synchronize: Callable[[], None] = (lambda: None) if cpu else torch.cuda.synchronize

    def bare(self, width: int, layers: int, steps: int) -> float:
        """Return the seconds of a step in a loop by hand."""
        module = Stack(width, layers).to(self.device)
        module.log = lambda *_: None  # type: ignore[method-assign]
        optimizer = module.configure_optimizers()
        clock = Clock(steps, self.synchronize)
        for index, batch in enumerate(_loader(width, steps)):
            clock.on_train_batch_start(None, module, batch, index)
            module.training_step([tensor.to(self.device) for tensor in batch], index).backward()
            optimizer.step()
            optimizer.zero_grad()
        return clock.step_s

    def fitted(self, width: int, layers: int, steps: int, every_steps: int | None = None, **options: Any) -> float:
        """Return the seconds of a step in a fit that is kept, with a snapshot after every so many steps."""
        clock = Clock(steps, self.synchronize)
        policy = {"every_seconds": 3600} if every_steps is None else {"every_steps": every_steps, "keep": 1}
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(
                max_epochs=1,
                enable_progress_bar=False,
                deterministic=False,
                snapshots=policy,
                callbacks=[clock],
                **{**self.options, **options},
            )
            trainer.fit(Stack(width, layers), _loader(width, steps), run=folder)
        return clock.step_s

    def copy_s(self, size_bytes: int) -> float:
        """Return the seconds of a copy of so much to memory of the host that is pinned."""
        source = torch.ones(size_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        times = []
        for _ in range(5):
            began_s = time.perf_counter()
            target.copy_(source)
            self.synchronize()
            times.append(time.perf_counter() - began_s)
        return statistics.median(times)


def _loader(width: int, steps: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(BATCH, width).repeat(steps, 1)), BATCH)


def _interleaved(rounds: int, *timed: Callable[[], float]) -> list[float]:
    found = [[one() for one in timed] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*found, strict=True)]


def steps(bench: Bench, rounds: int, *, cpu: bool) -> None:
    """Print what a step costs."""
    for width, layers, count in [(64, 2, 320), *([] if cpu else [(1024, 4, 320), (4096, 4, 160)])]:
        alone, fitted = _interleaved(
            rounds,
            partial(bench.bare, width, layers, count),
            partial(bench.fitted, width, layers, count),
        )
        said = f"bare {alone * 1e6:.0f} us, fit {fitted * 1e6:.0f} us, x {fitted / alone:.3f}"
        print(f"step     {layers} layers of {width}: {said}", flush=True)


def snapshots(bench: Bench, rounds: int, *, cpu: bool) -> None:
    """Print for how long a snapshot stalls training: weights and two numbers of the optimizer for each."""
    for width, layers in [(512, 4)] if cpu else [(2048, 4), (8192, 2), (16384, 3)]:
        size_bytes = 3 * 4 * layers * width * (width + 1)
        count, every = 80, 20
        without, having = _interleaved(
            rounds,
            partial(bench.fitted, width, layers, count),
            partial(bench.fitted, width, layers, count, every),
        )
        stall_s, copy_s = (having - without) * every, bench.copy_s(size_bytes)
        print(
            f"snapshot {size_bytes / 1e6:.0f} MB: {stall_s * 1e3:.1f} ms, a copy to the host {copy_s * 1e3:.1f} ms, "
            f"x {stall_s / copy_s:.2f}",
            flush=True,
        )


def memory(bench: Bench) -> None:
    """Print the peak memory of a fit on one GPU, by a world of one rank: what is cut has a group to be cut over."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29591"}
    for strategy, options in {
        "ddp": {"strategy": "ddp"},
        "fully_sharded": {"strategy": "fully_sharded"},
        "fully_sharded, bf16": {"strategy": "fully_sharded", "precision": "bf16"},
        "fully_sharded, bf16 gathered": {
            "strategy": "fully_sharded",
            "precision": "bf16",
            "strategy_args": {"param_dtype": "bf16"},
        },
        "fully_sharded, offload": {"strategy": "fully_sharded", "strategy_args": {"cpu_offload": True}},
    }.items():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        bench.fitted(4096, 12, WARM + 2, **options)
        print(f"memory   {strategy}: {torch.cuda.max_memory_allocated() / 1e6:.0f} MB at most", flush=True)


def main() -> None:
    """Print all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    cpu = arguments.cpu
    if not cpu and not torch.cuda.is_available():
        sys.exit("there is no GPU here (torch.cuda.is_available() is False): say --cpu to try the script itself")
    logging.disable(logging.WARNING)
    print(f"torch {torch.__version__} on {'the CPU' if cpu else torch.cuda.get_device_name()}", flush=True)
    bench = Bench(cpu=cpu)
    steps(bench, arguments.rounds, cpu=cpu)
    snapshots(bench, arguments.rounds, cpu=cpu)
    if not cpu:
        memory(bench)


if __name__ == "__main__":
    main()
