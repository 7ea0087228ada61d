"""State in data that only a loader holds."""

import functools
import multiprocessing
import sqlite3
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from laws.objects.small import Rows, Small
from torch import Tensor
from torch.utils.data import ChainDataset, ConcatDataset, DataLoader, Dataset, IterableDataset, StackDataset, Subset
from torch.utils.data import TensorDataset as Tensors


class Doubled(Rows):
    def __getitem__(self, index: int) -> Tensor:
        return 2 * super().__getitem__(index)


def rows(values: list[Any]) -> Tensor:
    """Make a batch of samples of all kinds: tensors, and tuples, lists and dicts of them."""
    return torch.stack([torch.stack(list(_tensors(value))).sum(0) for value in values])


def _tensors(value: Any) -> Any:
    items = value.values() if isinstance(value, dict) else value
    return [value] if isinstance(value, Tensor) else [tensor for item in items for tensor in _tensors(item)]


class ReadsTorchData(Small):
    """Indices, tensors and data sets that torch's own hold are changed in place and set anew."""

    workers, persistent = 0, False

    def train_dataloader(self) -> Any:
        return DataLoader(
            self.data(), 8, shuffle=True, collate_fn=rows, num_workers=self.workers, persistent_workers=self.persistent
        )

    def data(self) -> Any:
        zeros, chosen = torch.zeros(24, 2), [*range(12)]
        stacked: Any = StackDataset(x=Rows(), y=list(zeros))
        parts = [Subset(Subset(Rows(), range(20)), chosen), Tensors(Rows().rows[:6], zeros[:6])]
        return ConcatDataset([*parts, Subset(stacked, chosen)])

    def factor(self, batch: Tensor) -> Any:
        self.tell(self.trainer.train_dataloader.dataset, int(self.global_step))
        return 1.0

    def tell(self, data: Any, step: int) -> None:
        chosen, tensors, stacked = data.datasets
        chosen.indices[step] = 19 - step
        chosen.indices.reverse()
        chosen.dataset.indices = range(20, 0, -1)
        tensors.tensors[1][step] += 1
        tensors.tensors = (tensors.tensors[0] * 1.1, tensors.tensors[1])
        stacked.dataset.datasets["y"][step] = torch.ones(2)
        data.datasets[0] = Subset(chosen.dataset, chosen.indices)


class ReadsTorchDataInWorkers(ReadsTorchData):
    workers = 1


class ReadsTorchDataInWorkersThatStay(ReadsTorchDataInWorkers):
    persistent = True


class Scaled(list[Any]):
    """A list of the user's own, with an attribute."""

    scale = 1.0

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) * self.scale


class ReadsList(ReadsTorchDataInWorkers):
    def data(self) -> Any:
        return Scaled(Rows().rows)

    def tell(self, data: Any, step: int) -> None:
        data[step] = torch.ones(2)
        data[23].add_(1)
        data.append(data.pop(0))
        data.scale *= 1.1


class ReadsDict(ReadsTorchData):
    def data(self) -> Any:
        return {index: [row, row] for index, row in enumerate(Rows().rows)}

    def tell(self, data: Any, step: int) -> None:
        data[step][1] = torch.ones(2)


class ReadsArray(ReadsTorchData):
    def data(self) -> Any:
        return Rows().rows.numpy()

    def train_dataloader(self) -> Any:
        return DataLoader(self.data(), 8)

    def tell(self, data: Any, step: int) -> None:
        data[:] += step


class Reclassifies(ReadsTorchDataInWorkers):
    """Workers that read have the class that the data were of when the epoch began."""

    def data(self) -> Any:
        return Rows()

    def tell(self, data: Any, step: int) -> None:
        data.__class__ = Doubled


class Shared(Rows):
    """One tensor under two names, and training sets another under both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = torch.ones(1)

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) * self.second.sum()


class ReadsShared(ReadsTorchData):
    def data(self) -> Any:
        return Shared()

    def tell(self, data: Any, step: int) -> None:
        data.first = data.second = torch.ones(step + 2)


class Stream(IterableDataset[Tensor]):
    def __init__(self, by: float) -> None:
        self.by = by

    def __iter__(self) -> Any:
        return iter(Rows().rows[:12] * self.by)


class ReadsChain(ReadsTorchData):
    def train_dataloader(self) -> Any:
        return DataLoader(ChainDataset([Stream(1.0), Stream(2.0)]), 8)

    def tell(self, data: Any, step: int) -> None:
        data.datasets.reverse()


def scaled_by(factors: list[float]) -> Any:
    def collate(values: list[Tensor]) -> Tensor:
        return torch.stack(values) * sum(factors)

    return collate


class ClosesAnew(Small):
    """Replaces the collate_fn by one of the same code over another list; the pass goes on with the one before."""

    data: type[Any] = Rows
    samples = 8

    def build(self) -> None:
        self.loader = DataLoader(self.data(), self.samples, collate_fn=scaled_by([1.0]))

    def factor(self, batch: Tensor) -> Any:
        collate: Any = self.loader.collate_fn
        self.loader.collate_fn = scaled_by([*collate.__closure__[0].cell_contents, 0.5])
        return 1.0


class Streamed(Stream):
    def __init__(self) -> None:
        super().__init__(1.0)


class ClosesOverOne(ClosesAnew):
    """Each closure has the list of the one before, which goes on with it."""

    samples = 4

    def factor(self, batch: Tensor) -> Any:
        collate: Any = self.loader.collate_fn
        factors = collate.__closure__[0].cell_contents
        factors.append(0.1)
        self.loader.collate_fn = scaled_by(factors)
        return 1.0


def scaled_to(factors: list[float], values: list[Tensor]) -> Tensor:
    return torch.stack(values) * sum(factors)


class HandsOn(ClosesAnew):
    """The first pass goes on with the module's list, which grows; those after it have copies."""

    def build(self) -> None:
        self.factors = [1.0]
        self.loader = DataLoader(Rows(), 4, collate_fn=partial(scaled_to, self.factors))

    def factor(self, batch: Tensor) -> Any:
        self.factors.append(0.1)
        self.loader.collate_fn = partial(scaled_to, [*self.factors])
        return 1.0


class ClosesAnewOverStream(ClosesAnew):
    data = Streamed


class ReadsLongList(ReadsTorchData):
    """More indices than a snapshot takes."""

    warns = r"part of no snapshot: data\.training \(torch\)\.indices \(1200 items \w+, now 1200 items \w+\)"

    def data(self) -> Any:
        return Subset(Rows(), [*range(24)] * 50)

    def tell(self, data: Any, step: int) -> None:
        data.indices.reverse()


class Grows(ReadsTorchData):
    """A list in data comes to be larger than a snapshot takes; it decides nothing."""

    def data(self) -> Any:
        data: Any = Rows()
        data.seen = []
        return data

    def tell(self, data: Any, step: int) -> None:
        data.seen += [0] * 600


class Heard(Rows):
    """What it is told, other processes hear at once; nothing is made of it, since that would be as chance has it."""

    def __init__(self) -> None:
        super().__init__()
        self.step = multiprocessing.Value("q", 0)


class TellsWorkersThatRead(ReadsTorchDataInWorkers):
    warns = r"data set\.step\._obj has changed in memory that the workers of a loader share, while they read ahead"

    def data(self) -> Any:
        return Heard()

    def tell(self, data: Any, step: int) -> None:
        data.step.value += 1


class Table:
    """A library's data."""

    __module__ = "json"

    def __init__(self) -> None:
        self.view = "train"

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return Rows().rows[index]


class ReadsTable(ReadsTorchData):
    def data(self) -> Any:
        return Table()

    def tell(self, data: Any, step: int) -> None:
        data.view = f"part {step}"


class Pictures(Dataset[Tensor]):
    """A library's data set."""

    __module__ = "json"

    def __init__(self) -> None:
        self.labels = [0.0] * 24

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return Rows().rows[index] + self.labels[index]


class ReadsPictures(ReadsTorchData):
    def data(self) -> Any:
        return Pictures()

    def tell(self, data: Any, step: int) -> None:
        data.labels[step] = 1.0


@functools.lru_cache
def weight_of(index: int) -> float:
    """Return a number, computed once."""
    return index / 24


def opened() -> Any:
    return Path(__file__).open("rb")


class Opens(Rows):
    """Opens a file and a database as it is read, and keeps what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.file: Any = None
        self.database: Any = None
        self.kept: dict[int, Tensor] = {}

    def __getitem__(self, index: int) -> Tensor:
        self.file = self.file or opened()
        self.database = self.database or sqlite3.connect(":memory:")
        self.kept[index] = super().__getitem__(index)
        return self.kept[index] * weight_of(index)


class ReadsFiles(ReadsTorchData):
    """What reading data makes is neither kept nor named."""

    def data(self) -> Any:
        return Opens()

    def tell(self, data: Any, step: int) -> None:
        data.scale *= 1.1


class Flagged(Rows):
    """Opens a file and loads as it is read, and has flags for that."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: Any = None
        self.is_open, self.is_filled = False, [False] * 24
        self.wide = torch.zeros(24, 12_000)

    def __getitem__(self, index: int) -> Tensor:
        if not self.is_open:
            self.file, self.is_open = opened(), True
        if not hasattr(self, "levels"):
            self.levels = torch.ones(24, 12_000)
        if not self.is_filled[index]:
            self.wide[index, :2] = self.rows[index]
            self.is_filled[index] = True
        self.file.seek(index)
        return self.wide[index, :2] * self.levels[index, 0] * self.scale


class ReadsFlagged(ReadsFiles):
    """Flags of what reading makes, and no snapshot holds, are set anew with it."""

    def data(self) -> Any:
        return Flagged()


class Placed(Rows):
    """Knows where in a large tensor it keeps each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.places = torch.zeros(24, 12_000), dict[int, int]()

    def __getitem__(self, index: int) -> Tensor:
        if index not in self.places:
            self.places[index] = len(self.places)
            self.wide[self.places[index], :2] = self.rows[index]
        return self.wide[self.places[index], :2]


class ReadsPlaced(ReadsFiles):
    warns = "reading the data changes data.training.wide, which no snapshot holds, and data.training.places"

    def data(self) -> Any:
        return Placed()


class Reader:
    """Opens a file when it is first read."""

    def __init__(self) -> None:
        self.file: Any = None
        self.reads = 0

    def read(self) -> None:
        self.file = self.file or opened()
        self.reads += 1


class OpensMore(Rows):
    """Holds readers, pools and locks in all forms, made in `__init__` or as it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader()
        self.files: list[Any] = [None] * 2
        self.shards: dict[int, Any] = {}
        self.newest: deque[Any] = deque()
        self.pool = ThreadPoolExecutor(1)
        self.lock, self.condition, self.semaphore = threading.RLock(), threading.Condition(), threading.Semaphore()
        self.of_thread = threading.local()

    def __getitem__(self, index: int) -> Tensor:
        if not hasattr(self, "late"):
            self.late = Reader()
            self.late.read()
            self.late_lock, self.late_pool = threading.Lock(), ThreadPoolExecutor(1)
        if not hasattr(self.of_thread, "database"):
            self.of_thread.database = sqlite3.connect(":memory:")
        self.files[index % 2] = self.files[index % 2] or opened()
        if index // 4 not in self.shards:
            self.shards[index // 4] = (opened(), 1.0)
        if not self.newest:
            self.newest.append(opened())
        with self.lock, self.condition, self.semaphore, self.late_lock:
            self.reader.read()
            self.late.file.seek(0)
            row: Tensor = self.late_pool.submit(super().__getitem__, index).result()
        return row * (1 + self.semaphore._value + self.shards[index // 4][1])  # type: ignore[attr-defined]


class ReadsMoreFiles(ReadsFiles):
    """So are files in containers and in objects that reading has made, and idle locks and pools."""

    def data(self) -> Any:
        return OpensMore()
