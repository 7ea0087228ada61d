"""Costs of the engine on a GPU: steps versus a plain loop, snapshots versus a plain copy, memory of strategies.

make bench-gpu

Rounds are interleaved; figures are medians. With `--cpu`, to try this script, sizes are small and memory is left out.
"""

import argparse
import gc
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

WARM, BLOCK, BATCH = 20, 20, 64


class Stack(TrainingModule):
    """Layers of the same width in a row, which strategies can shard."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        loss: Tensor = self.net(batch[0]).square().mean()
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Return an optimizer with two state elements per weight."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Clock(Callback):
    """Times blocks of steps after the warm-up; each block ends when the device has finished its work.

    Args:
        synchronize: waits for the device.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._blocks_s: list[float] = []
        self._began_s = 0.0

    @property
    def step_s(self) -> float:
        """Seconds per step, as the median of the blocks."""
        return statistics.median(self._blocks_s) / BLOCK

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Begin a block, and end the one before."""
        steps = batch_idx - WARM
        if steps < 0 or steps % BLOCK:
            return
        self._synchronize()
        if steps:
            self._blocks_s.append(time.perf_counter() - self._began_s)
        self._began_s = time.perf_counter()


class Pauses(Callback):
    """Times the pauses between steps, measured when the device has finished its work.

    Args:
        synchronize: waits for the device.
        rest_s: seconds to wait before a snapshot, so that the previous one is written by then.
    """

    def __init__(self, synchronize: Callable[[], None], rest_s: float) -> None:
        self._synchronize, self._rest_s = synchronize, rest_s
        self._without_s: list[float] = []
        self._having_s: list[float] = []
        self._ended_s = 0.0

    @property
    def stalls_s(self) -> list[float]:
        """Seconds by which the pause of each snapshot was longer than other pauses."""
        return [having_s - statistics.median(self._without_s) for having_s in self._having_s]

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Begin."""
        if (batch_idx + 1) % BLOCK == 0:
            time.sleep(self._rest_s)
        self._synchronize()
        self._ended_s = time.perf_counter()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """End."""
        if batch_idx > 1:  # after the first step the state is tried
            pauses_s = self._without_s if batch_idx % BLOCK else self._having_s
            pauses_s.append(time.perf_counter() - self._ended_s)


class Bench:
    """The device, and what is trained on it.

    Args:
        cpu: try the script without a GPU.
    """

    def __init__(self, *, cpu: bool) -> None:
        self.device = torch.device("cpu" if cpu else "cuda:0")
        self.options: dict[str, Any] = {"accelerator": "cpu"} if cpu else {"gpus": [0]}
        self.synchronize: Callable[[], None] = (lambda: None) if cpu else torch.cuda.synchronize

    def bare(self, width: int, layers: int, steps: int, batch: int = BATCH) -> float:
        """Return the seconds of a step in a plain PyTorch loop."""
        with self.device:
            module = Stack(width, layers)
        module.log = lambda *_: None  # type: ignore[method-assign]
        optimizer = module.configure_optimizers()
        clock = Clock(self.synchronize)
        for index, samples in enumerate(_loader(width, steps, batch)):
            clock.on_train_batch_start(None, module, samples, index)
            module.training_step([tensor.to(self.device) for tensor in samples], index).backward()
            optimizer.step()
            optimizer.zero_grad()
        return clock.step_s

    def fitted(self, width: int, layers: int, steps: int, batch: int = BATCH, **options: Any) -> float:
        """Return the seconds of a step in a fit that writes a run; `options` are those of the Trainer."""
        clock = Clock(self.synchronize)
        self.fit(width, layers, steps, batch, callbacks=[clock], **options)
        return clock.step_s

    def stalls_s(self, width: int, layers: int, rest_s: float) -> list[float]:
        """Return the seconds that each of some snapshots stalls training, with a rest before each."""
        pauses = Pauses(self.synchronize, rest_s)
        self.fit(width, layers, 5 * BLOCK + 1, callbacks=[pauses], snapshots={"every_steps": BLOCK, "keep": 1})
        return pauses.stalls_s

    def fit(
        self, width: int, layers: int, steps: int, batch: int = BATCH, *, on_host: bool = False, **options: Any
    ) -> None:
        """Fit a net, built on the device or the host, with its run in a temporary folder."""
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(
                max_epochs=1,
                enable_progress_bar=False,
                deterministic=False,
                **{"snapshots": {"every_seconds": 3600}, **self.options, **options},
            )
            with torch.device("cpu") if on_host else self.device:
                module = Stack(width, layers)
            trainer.fit(module, _loader(width, steps, batch), run=folder)

    def copy_s(self, size_bytes: int) -> float:
        """Return the seconds of a copy of `size_bytes` bytes to pinned host memory."""
        source = torch.ones(size_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        times = []
        for _ in range(5):
            began_s = time.perf_counter()
            target.copy_(source)
            self.synchronize()
            times.append(time.perf_counter() - began_s)
        return statistics.median(times)


def _loader(width: int, steps: int, batch: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(batch, width).repeat(steps, 1)), batch)


def _interleaved(rounds: int, *timed: Callable[[], float]) -> list[float]:
    found = [[one() for one in timed] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*found, strict=True)]


def steps(bench: Bench, rounds: int, *, cpu: bool) -> None:
    """Print the cost of a step: for nets limited by kernel launches, and for one limited by the GPU."""
    for width, layers, batch, count in [
        (64, 2, 1, 620),
        (64, 2, BATCH, 320),
        *([] if cpu else [(1024, 8, BATCH, 320), (4096, 4, BATCH, 220), (8192, 4, BATCH, 120)]),
    ]:
        alone, fitted = _interleaved(
            rounds,
            partial(bench.bare, width, layers, count, batch),
            partial(bench.fitted, width, layers, count, batch),
        )
        said = f"bare {alone * 1e6:.0f} us, fit {fitted * 1e6:.0f} us, x {fitted / alone:.3f}"
        print(f"step     {layers} layers of {width}, batch {batch}: {said}", flush=True)


def snapshots(bench: Bench, *, cpu: bool) -> None:
    """Print how long a snapshot of weights and two optimizer values per weight stalls training.

    The first snapshot also allocates and pins host memory.
    """
    for width, layers in [(512, 4)] if cpu else [(2048, 4), (8192, 2), (8192, 12)]:
        size_bytes = 3 * 4 * layers * width * (width + 1)
        first_s, *later_s = bench.stalls_s(width, layers, rest_s=1 + size_bytes / 1e9)
        stall_s, copy_s = statistics.median(later_s), bench.copy_s(size_bytes)
        print(
            f"snapshot {size_bytes / 1e6:.0f} MB: {stall_s * 1e3:.1f} ms, a copy to the host {copy_s * 1e3:.1f} ms, "
            f"x {stall_s / copy_s:.2f}; the first one {first_s * 1e3:.0f} ms",
            flush=True,
        )


def memory(bench: Bench) -> None:
    """Print the peak memory of a fit on one GPU, in a world of one rank, which sharded strategies need."""
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
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        bench.fit(4096, 12, WARM, on_host=True, **options)
        print(f"memory   {strategy}: {torch.cuda.max_memory_allocated() / 1e6:.0f} MB at most", flush=True)


def main() -> None:
    """Run and print all measurements."""
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
    if not cpu:
        memory(bench)
    snapshots(bench, cpu=cpu)


if __name__ == "__main__":
    main()
