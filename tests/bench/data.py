"""What reading exactly costs: midstride's loader, torchdata's StatefulDataLoader and a plain DataLoader, interleaved.

make bench-data

Rounds go through all of them, each in the other direction; a ratio is of wall time against the plain loader of the
same round: with workers of an epoch, without of a batch's first decile, which other work on the machine changes little.
StatefulDataLoader (where torchdata is installed) gives its state at every step, once as most use it, which loses the
workers' random numbers, and once with the generators in the data set's state, which is exact.

A second table tells what it costs to come to a batch of an epoch of a thousand million samples.
"""

import argparse
import importlib.util
import random
import statistics
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from operator import sub
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from midstride.engine.data import StatefulDataLoader
from midstride.engine.data.dataloader_order import training_loader
from midstride.engine.data.iterable.loader import IterableLoader
from midstride.engine.world import World

BATCH = 32


class Rows(Dataset[Tensor]):
    """Rows of 32 numbers.

    Args:
        samples: how many.
        work_s: seconds spent on each.
        noise: draw from torch's generator for each.
    """

    def __init__(self, samples: int, work_s: float = 0.0, *, noise: bool = False) -> None:
        self.rows, self.work_s, self.noise = torch.randn(samples, 32), work_s, noise

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        if self.work_s:
            until = time.perf_counter() + self.work_s
            while time.perf_counter() < until:
                pass
        row = self.rows[index]
        return row + torch.randn(32) if self.noise else row


class Remembering(Rows):
    """Gives the generators as its state, which is what makes StatefulDataLoader exact."""

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])


class Stream(IterableDataset[Tensor]):
    """The same rows, one after the other; a plain generator, without a state."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Tensor]:
        return (self.rows[index] for index in range(len(self.rows)))


#: what the data do -> samples, seconds a sample, whether they draw, workers
CASES: dict[str, tuple[int, float, bool, int]] = {
    "trivial, 0 workers": (32_000, 0.0, False, 0),
    "trivial, 2 workers": (32_000, 0.0, False, 2),
    "draws from torch, 0 workers": (32_000, 0.0, True, 0),
    "0.6 ms a sample, 0 workers": (2_000, 6e-4, False, 0),
    "0.6 ms a sample, 2 workers": (2_000, 6e-4, False, 2),
    "an iterable, 0 workers": (32_000, 0.0, False, 0),
}

#: batches of an epoch of so many samples that a life begins at
SAMPLES, BATCHES = 1_000_000_000, (0, 10, 1_000_000, 30_000_000)

Data = Rows | Stream
Reader = Callable[[Data, int], Iterator[Any]]


def plain(dataset: Data, workers: int) -> Iterator[Any]:
    return iter(DataLoader(dataset, BATCH, shuffle=isinstance(dataset, Rows), num_workers=workers))


def ours(dataset: Data, workers: int) -> Iterator[Any]:
    loader: DataLoader[Any] = DataLoader(dataset, BATCH, shuffle=isinstance(dataset, Rows), num_workers=workers)
    if isinstance(dataset, Stream):
        return IterableLoader(loader, name="the training loader", key=0, limit=1.0).batches(0)
    return training_loader(loader, World(), seed=0, shard=False, limit=1.0).batches(0)


def alone(dataset: Data, workers: int) -> Iterator[Any]:
    """Ours for other loops, its state at every step."""
    loader: StatefulDataLoader[Any] = StatefulDataLoader(
        dataset, BATCH, shuffle=isinstance(dataset, Rows), num_workers=workers
    )
    for batch in loader:
        loader.state_dict()
        yield batch


def stateful(dataset: Data, workers: int) -> Iterator[Any]:
    from torchdata import stateful_dataloader as torchdata

    loader: Any = torchdata.StatefulDataLoader(dataset, BATCH, shuffle=isinstance(dataset, Rows), num_workers=workers)
    for batch in loader:
        loader.state_dict()
        yield batch


def stateful_exact(dataset: Data, workers: int) -> Iterator[Any]:
    rows = dataset.rows if isinstance(dataset, Stream) else dataset
    kept = Remembering(len(rows), rows.work_s, noise=rows.noise)
    return stateful(Stream(kept) if isinstance(dataset, Stream) else kept, workers)


READERS: dict[str, Reader] = {"plain DataLoader": plain, "midstride": ours, "midstride alone, stateful": alone}
if importlib.util.find_spec("torchdata") is not None:
    READERS |= {"torchdata": stateful, "torchdata, exact": stateful_exact}


def us_a_batch(reader: Reader, dataset: Data, workers: int) -> float:
    """Read an epoch; the first batch, with the start of the workers, is left out."""
    read_ns = [time.perf_counter_ns() for _ in reader(dataset, workers)]
    if workers:  # batches come in bursts
        return (read_ns[-1] - read_ns[0]) / (len(read_ns) - 1) / 1e3
    return statistics.quantiles(map(sub, read_ns[1:], read_ns), n=10)[0] / 1e3


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")
    table = Table("data", "loader", "us a batch", "ratio", "from-to")
    table.title = f"batches of {BATCH}, median of {rounds} interleaved rounds"
    for case, (samples, work_s, noise, workers) in CASES.items():
        rows = Rows(samples, work_s, noise=noise)
        dataset = Stream(rows) if "iterable" in case else rows
        found: dict[str, list[float]] = {name: [] for name in READERS}
        for number in range(rounds):
            for name in list(READERS)[:: -1 if number % 2 else 1]:
                found[name].append(us_a_batch(READERS[name], dataset, workers))
        for name, times in found.items():
            ratios = sorted(b / a for a, b in zip(found["plain DataLoader"], times, strict=True))
            cells = f"{statistics.median(times):.0f}", f"{statistics.median(ratios):.2f}"
            table.add_row(case if name == "plain DataLoader" else "", name, *cells, f"{ratios[0]:.2f}-{ratios[-1]:.2f}")
    Console(width=120).print(table)
    resumes = Table("resumed at batch", "first batch after, ms", "memory taken, MB")
    resumes.title = f"an epoch of {SAMPLES:,} samples"
    for batch in BATCHES:
        resumes.add_row(f"{batch:,}", *to_first_batch(batch))
    Console(width=120).print(resumes)


def to_first_batch(batch: int) -> tuple[str, str]:
    """Return ms and MB until the first batch of a life that begins at `batch`, its loader included."""
    loader: DataLoader[int] = DataLoader(range(SAMPLES), BATCH, shuffle=True)

    def read() -> None:
        next(training_loader(loader, World(), seed=0, shard=False, limit=1.0).batches(0, batch))

    began = time.perf_counter()
    read()
    ms = (time.perf_counter() - began) * 1e3
    tracemalloc.start()  # slows it down
    read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return f"{ms:.0f}", f"{peak / 1e6:.1f}"


if __name__ == "__main__":
    main()
