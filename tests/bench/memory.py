"""Memory of a rank under ddp, sharded and fully_sharded: a model whose optimizer state outweighs its activations.

Then what a rank reads, and by how much its memory grows, when a snapshot is resumed by another number of ranks.

make bench-memory

The allocator gives back at once what is freed (`--keep-freed` leaves it as it is): else a peak shows what malloc keeps
for later, which hides what the strategies differ in.
"""

import argparse
import ctypes
import json
import logging
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Callback, Trainer, TrainingModule
from midstride.engine.testing.ranks import PRELOAD, run_ranks

STRATEGIES = ("ddp", "sharded", "fully_sharded")
STEPS, BATCH = 4, 8
#: numbers of ranks, before and after a resume
CHANGES = ((4, 4), (4, 2), (2, 4), (4, 3))
RESUMED_AT, GLOBAL_BATCH = 1, 12
MB = 1e6


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Deep(TrainingModule):
    """Blocks of one linear layer each, under Adam: the optimizer keeps two numbers for each weight."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


class Scales(Callback):
    """Weighs what this rank has right after a step, its gradients included."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        kept = [value for state in optimizer.state.values() for value in state.values()]
        parts = {"weights": weights, "gradients": [p.grad for p in weights], "optimizer": kept}
        self.found = {name: sum(map(_bytes, tensors)) / MB for name, tensors in parts.items()}


def _bytes(tensor: Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def _memory(kind: str) -> float:
    """Return "VmRSS", what this process holds, or "VmHWM", the most it ever held."""
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / MB


#: of glibc's mallopt: larger blocks are mapped by themselves, and so given back; more free memory than that as well
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _KEPT_BYTES = -1, -3, 65536


def give_back_freed() -> None:
    """Have malloc return what is freed to the system."""
    libc = ctypes.CDLL(None)
    for threshold in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
        assert libc.mallopt(threshold, _KEPT_BYTES)


def train(strategy: str, blocks: int, width: int, folder: str, keep_freed: bool) -> None:
    """Train some steps and write what that took; called in each rank."""
    if not keep_freed:
        give_back_freed()
    logging.disable(logging.WARNING)
    scales = Scales()
    trainer = Trainer(strategy=strategy, max_steps=STEPS, snapshots=None, callbacks=[scales], enable_progress_bar=False)
    before = _memory("VmRSS")
    data = DataLoader(TensorDataset(torch.randn(STEPS * BATCH * trainer.world.size, width)), batch_size=BATCH)
    trainer.fit(Deep(blocks, width), data)
    found = {**scales.found, "peak": _memory("VmHWM") - before}
    Path(folder, f"{trainer.world.rank}.json").write_text(json.dumps(found))


def measure(strategy: str, ranks: int, blocks: int, width: int, keep_freed: bool) -> dict[str, float]:
    """Return what the rank has that has most."""
    with tempfile.TemporaryDirectory() as folder:
        given = strategy, blocks, width, folder, keep_freed
        codes = run_ranks(train, *given, processes=ranks, timeout_s=600, preload=PRELOAD)
        assert not any(codes), codes
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    return {name: max(one[name] for one in found) for name in found[0]}


class Reads(Callback):
    """Measures what a resume reads and takes, from the moment at which the optimizer is made."""

    def __init__(self, folder: str) -> None:
        self.folder, self.before, self.at_end = folder, (0.0, 0.0), 0.0

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak of memory is counted from here
        self.before = _bytes_read(), _memory("VmRSS")

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == RESUMED_AT:
            found = {"read": _bytes_read() - self.before[0], "grown": _memory("VmHWM") - self.before[1]}
            Path(self.folder, f"{trainer.global_rank}.json").write_text(json.dumps(found))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self.at_end = _memory("VmRSS")  # the last snapshot is copied; `last` is saved after this


def _bytes_read() -> float:
    found = re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())
    assert found is not None
    return int(found[1]) / MB


def train_run(strategy: str, blocks: int, width: int, folder: str, steps: int) -> None:
    """Train a run up to a step; called in each rank."""
    give_back_freed()
    logging.disable(logging.WARNING)
    options: dict[str, Any] = {"snapshots": {"every_steps": 1000}, "enable_progress_bar": False}
    reads = Reads(folder)
    trainer = Trainer(strategy=strategy, max_steps=steps, callbacks=[reads], **options)
    data = DataLoader(
        TensorDataset(torch.randn(10 * GLOBAL_BATCH, width)), batch_size=GLOBAL_BATCH // trainer.world.size
    )
    trainer.fit(Deep(blocks, width), data, run=f"{folder}/run")
    Path(folder, f"end-{trainer.world.rank}.json").write_text(json.dumps(_memory("VmHWM") - reads.at_end))


def measure_resume(strategy: str, was: int, now: int, blocks: int, width: int) -> dict[str, float]:
    """Return a rank's own share in MB, bytes read and growth in shares, and rank 0's bytes over the others'."""
    with tempfile.TemporaryDirectory() as folder:
        for ranks, steps in ((was, RESUMED_AT), (now, RESUMED_AT + 1)):
            given = strategy, blocks, width, folder, steps
            codes = run_ranks(train_run, *given, processes=ranks, timeout_s=600, preload=PRELOAD)
            assert not any(codes), codes
            if steps == RESUMED_AT:
                newest = max(Path(folder, "run", "snapshots").iterdir())
                share = sum(path.stat().st_size for path in newest.glob("*.safetensors")) / MB / now
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(now)]
    read, grown = ([one[what] / share for one in found] for what in ("read", "grown"))
    return {"share": share, "read": max(read), "grown": max(grown), "first": read[0] / max(read[1:])}


def show_last(blocks: int, width: int, ranks: int = 4) -> None:
    """Print what saving `last` takes, in a rank's own part of the weights."""
    table = Table("", "own part, MB", "rank 0 grows by", "others grow by, at most", "largest file, of the mean")
    table.title = f"`last` of {ranks} ranks"
    for strategy in STRATEGIES[1:]:
        with tempfile.TemporaryDirectory() as folder:
            codes = run_ranks(train_run, strategy, blocks, width, folder, 1, processes=ranks, preload=PRELOAD)
            assert not any(codes), codes
            sizes = [path.stat().st_size for path in Path(folder, "run", "last").glob("*/*.safetensors")]
            grown = [json.loads(Path(folder, f"end-{rank}.json").read_text()) for rank in range(ranks)]
        own, largest = sum(sizes) / ranks / MB, max(sizes) / (sum(sizes) / ranks)
        shares = [f"{one / own:.2f}" for one in (grown[0], max(grown[1:]))]
        table.add_row(strategy, f"{own:.0f}", *shares, f"{largest:.2f}")
    Console(width=120).print(table)


def show_resumes(blocks: int, width: int) -> None:
    """Print what a resume takes, for each change of the number of ranks."""
    table = Table("", "ranks", "own share, MB", "read", "grown by", "rank 0 reads, of the others")
    table.title = "a resume, in shares of a rank"
    for strategy in STRATEGIES[1:]:
        for was, now in CHANGES:
            found = measure_resume(strategy, was, now, blocks, width)
            ratios = [f"{found[name]:.2f}" for name in ("read", "grown", "first")]
            table.add_row(strategy, f"{was} -> {now}", f"{found['share']:.0f}", *ratios)
    Console(width=120).print(table)


def main() -> None:
    """Print a table for each number of processes, and one of resumes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--keep-freed", action="store_true")
    parser.add_argument("--resumes", action="store_true", help="measure `last` and resumes alone")
    arguments = parser.parse_args()
    show_last(arguments.blocks, arguments.width)
    show_resumes(arguments.blocks, arguments.width)
    if arguments.resumes:
        return
    for ranks in arguments.processes:
        table = Table("", "weights", "gradients", "optimizer", "in all", "of ddp", "peak", "of ddp")
        table.title = f"{ranks} processes, MB a rank"
        found = {
            name: measure(name, ranks, arguments.blocks, arguments.width, arguments.keep_freed) for name in STRATEGIES
        }
        whole = {name: one["weights"] + one["gradients"] + one["optimizer"] for name, one in found.items()}
        for name, one in found.items():
            parts = [f"{one[part]:.0f}" for part in ("weights", "gradients", "optimizer")]
            peak = [f"{one['peak']:.0f}", f"{one['peak'] / found['ddp']['peak']:.0%}"]
            table.add_row(name, *parts, f"{whole[name]:.0f}", f"{whole[name] / whole['ddp']:.0%}", *peak)
        Console(width=120).print(table)


if __name__ == "__main__":
    main()
