"""What a snapshot costs, beside torch.save and torch.distributed.checkpoint: interleaved runs on one disk.

make bench-snapshots

Beside torchsnapshot as well, where it is installed: `pip install --no-deps torchsnapshot importlib_metadata aiofiles`.
"""

import argparse
import gc
import logging
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from midstride.engine.snapshots.buffer_pool import Buffer
from midstride.engine.snapshots.lease import acquire
from midstride.engine.snapshots.position import Position
from midstride.engine.snapshots.writer import Writer
from midstride.engine.state.codec import encode_lazily
from midstride.engine.storage.local import LocalStore
from midstride.engine.world import World

LAYERS = 16
CHUNK_BYTES = 8 * 2**20
#: the snapshot is taken before this step
AT_STEP = 3
#: bytes of state -> steps made in all, long enough for every method to end beside them
SIZES = {10e6: 60, 1e9: 300}


@dataclass
class Found:
    """What one method cost, a number a round."""

    stall_s: list[float] = field(default_factory=list)
    durable_s: list[float] = field(default_factory=list)
    lost_s: list[float] = field(default_factory=list)


class Training:
    """A model of 16 layers under Adam, `size` bytes of state in all, and a step of some milliseconds."""

    def __init__(self, size: float) -> None:
        width = int((size / 12 / LAYERS) ** 0.5)
        self.module = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
        self.optimizer = torch.optim.Adam(self.module.parameters())
        for parameter in self.module.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self._a, self._b = torch.randn(512, 512), torch.randn(512, 512)

    def state(self) -> dict[str, Any]:
        return {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> list[Tensor]:
        return [tensor.detach() for tensor in encode_lazily(self.state())[1].tensors]

    def step(self) -> None:
        x = self._a
        for _ in range(2):
            x = torch.tanh(x @ self._b)


Take = Callable[[dict[str, Any], Path], Callable[[], object]]


def torch_save(state: dict[str, Any], path: Path) -> Callable[[], object]:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return lambda: None


def dcp_save(state: dict[str, Any], path: Path) -> Callable[[], object]:
    dcp.save(state, checkpoint_id=path)
    return lambda: None


def has_torchsnapshot() -> bool:
    return find_spec("torchsnapshot") is not None


def torchsnapshot_take(state: dict[str, Any], path: Path) -> Callable[[], object]:
    library: Any = import_module("torchsnapshot")
    pending = library.Snapshot.async_take(path=str(path), app_state={"state": library.StateDict(**state)})
    wait: Callable[[], object] = pending.wait
    return wait


class DcpAsync:
    """`async_save` at its best: a stager that keeps its memory."""

    def __init__(self) -> None:
        self._stager = DefaultStager(StagingOptions(False, False, False, False))

    def __call__(self, state: dict[str, Any], path: Path) -> Callable[[], object]:
        saving: Any = dcp.async_save(state, checkpoint_id=path, async_stager=self._stager)
        return getattr(saving, "upload_completion", saving).result

    def close(self) -> None:
        self._stager.close()


class Ours:
    """The writer as a fit uses it."""

    def __init__(self, folder: Path) -> None:
        store = LocalStore(str(folder))
        self._writer = Writer(store, acquire(store, None, {}), World(), lambda value: [value], "bench", 1)
        self._count = 0

    def __call__(self, state: dict[str, Any], path: Path) -> Callable[[], object]:
        self._count += 1
        return self._writer.take(Position(self._count), state, "", {}).future.result

    def close(self) -> None:
        self._writer.close()


def run(training: Training, steps: int, take: Take | None, path: Path) -> tuple[float, float]:
    """Train so many steps; return the seconds that took, and those that the snapshot held it up."""
    stall_s = 0.0
    wait: Callable[[], object] = time.time
    gc.collect()
    began = time.perf_counter()
    for step in range(steps):
        if step == AT_STEP and take is not None:
            taken = time.perf_counter()
            wait = take(training.state(), path)
            stall_s = time.perf_counter() - taken
        training.step()
    whole_s = time.perf_counter() - began
    wait()
    return whole_s, stall_s


def durable(training: Training, take: Take, path: Path) -> float:
    """Return the seconds until a snapshot is on the disk, with nothing beside it."""
    began = time.perf_counter()
    take(training.state(), path)()
    return time.perf_counter() - began


def memcpy(training: Training, steps: int = 0) -> float:
    """Return the seconds to copy every tensor to memory that was touched before.

    Args:
        training: its tensors are copied.
        steps: executed before each copy; they evict the tensors from the caches of the processor.
    """
    sources = training.tensors()
    memory = Buffer().reserve(sum(tensor.nbytes for tensor in sources))
    targets, start = [], 0
    for tensor in sorted(sources, key=lambda tensor: -tensor.nbytes):
        targets.append(memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += tensor.nbytes
    times = []
    for _ in range(3):
        for _ in range(steps):
            training.step()
        began = time.perf_counter()
        for target, source in zip(targets, sorted(sources, key=lambda tensor: -tensor.nbytes), strict=True):
            target.copy_(source)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def raw(size: int, path: Path) -> float:
    """Return the seconds to write so many bytes past the page cache, to one new file, as those of snapshots are.

    To write over a file that is there takes less: its blocks are found already.
    """
    path.unlink(missing_ok=True)
    memory = Buffer().reserve(size)
    torch.arange(size // 8, out=memory.view(torch.int64))
    data = memory.numpy().data
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    began = time.perf_counter()
    for start in range(0, size, CHUNK_BYTES):
        os.write(handle, data[start : start + CHUNK_BYTES])
    os.fsync(handle)
    found = time.perf_counter() - began
    os.close(handle)
    return found


def raw_in_order(size: int, folder: Path) -> float:
    """Return the seconds of `raw`, of the name in its folder, of a small file after it and of that one's name.

    A commit waits for these four one after another.
    """
    folder.mkdir(exist_ok=True)
    found, began = raw(size, folder / "data"), time.perf_counter()
    _sync(folder)
    (folder / "manifest").write_bytes(b"x" * 3000)
    _sync(folder / "manifest")
    _sync(folder)
    return found + time.perf_counter() - began


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def measure(size: float, rounds: int, folder: Path) -> Table:
    """Return the table of one size; every round runs every method, every second one backwards."""
    training = Training(size)
    whole = sum(tensor.nbytes for tensor in training.tensors()) // 4096 * 4096
    ours, asynchronous = Ours(folder / "ours"), DcpAsync()
    methods: dict[str, Take] = {
        "midstride": ours,
        "torch.save + fsync": torch_save,
        "dcp.save": dcp_save,
        "dcp.async_save": asynchronous,
        **({"torchsnapshot.async_take": torchsnapshot_take} if has_torchsnapshot() else {}),
    }
    found = {name: Found() for name in methods}
    copies, cold, disks, ordered, steps = [], [], [], [], SIZES[size]
    for number in range(rounds + 1):
        order = list(methods) if number % 2 else list(methods)[::-1]
        copies.append(memcpy(training))
        cold.append(memcpy(training, AT_STEP))
        disks.append(raw(whole, folder / "raw"))
        ordered.append(raw_in_order(whole, folder / "ordered"))
        bare_s = run(training, steps, None, folder)[0]
        for name in order:
            path = folder / "there"
            whole_s, stall_s = run(training, steps, methods[name], path)
            _remove(path)
            durable_s = durable(training, methods[name], path)
            _remove(path)
            if number:  # the first round fills caches
                found[name].stall_s.append(stall_s)
                found[name].durable_s.append(durable_s)
                found[name].lost_s.append(whole_s - bare_s)
    ours.close()
    asynchronous.close()
    table = _table(whole, len(training.tensors()), copies[1:], disks[1:], found)
    table.caption = (
        f"memcpy after {AT_STEP} steps, as where a snapshot is taken: {min(cold[1:]) / min(copies[1:]):.2f} memcpys; "
        f"four syncs in order, as a commit needs: {min(disks[1:]) / min(ordered[1:]):.2f} of raw"
    )
    return table


def _table(size: int, tensors: int, copies: list[float], disks: list[float], found: dict[str, Found]) -> Table:
    copy_s, disk_s = min(copies), min(disks)
    table = Table("", "stall ms", "stall / memcpy", "durable GB/s", "of raw", "training lost ms")
    table.title = (
        f"{size / 1e6:.0f} MB in {tensors} tensors; memcpy {copy_s * 1e3:.2f} ms ({size / copy_s / 1e9:.1f} GB/s), "
        f"raw O_DIRECT {size / disk_s / 1e9:.2f} GB/s; best of {len(copies)} rounds [median]"
    )
    for name, one in found.items():
        stall_s, durable_s = min(one.stall_s), min(one.durable_s)
        stall = f"{stall_s * 1e3:.2f} [{statistics.median(one.stall_s) * 1e3:.2f}]"
        lost = f"{min(one.lost_s) * 1e3:.0f} [{statistics.median(one.lost_s) * 1e3:.0f}]"
        rate = f"{size / durable_s / 1e9:.2f}"
        table.add_row(name, stall, f"{stall_s / copy_s:.2f}", rate, f"{disk_s / durable_s:.0%}", lost)
    return table


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)


def main() -> None:
    """Print a table for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk to be measured")
    parser.add_argument("--sizes", type=float, nargs="*", choices=list(SIZES), default=list(SIZES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for size in arguments.sizes:
            Console(width=150).print(measure(size, arguments.rounds, Path(name)))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
