"""State in loaders."""

import threading
from functools import partial
from typing import Any

import torch
from laws.objects.small import Rows, Small, held_lock
from torch import Tensor
from torch.utils.data import ChainDataset, DataLoader, IterableDataset, get_worker_info

from midstride.engine import CombinedLoader


class Looping(DataLoader[Tensor]):
    """A loader with a way of its own to iterate."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


class Loops(Small):
    def train_dataloader(self) -> Any:
        return Looping(Rows(), 4)


class Graded(DataLoader[Tensor]):
    """Reads what it was told to, and has a set that says how much it was told."""

    def __init__(self, data: Any) -> None:
        super().__init__(data, 4, collate_fn=self.scaled)
        self.difficulty, self.told = 1.0, [1]

    def scaled(self, rows: list[Tensor]) -> Tensor:
        return torch.stack(rows) * self.difficulty


class Grades(Small):
    """Tells its loader how hard the next batch is; the loader of a stream too, by an attribute that is new."""

    def build(self) -> None:
        self.second = DataLoader(Plain(), 4)

    def train_dataloader(self) -> Any:
        return CombinedLoader([Graded(Rows()), self.second], "min_size")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch[0] + batch[1], batch_idx)

    def factor(self, batch: Tensor) -> Any:
        graded = self.trainer.train_dataloader.loaders[0]
        graded.difficulty *= 1.3
        graded.told.append(len(graded.told))
        self.second.phase = sum(graded.told)
        return self.second.phase


class Plain(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(Rows().rows)


class LockedLoader(DataLoader[Tensor]):
    def __init__(self) -> None:
        super().__init__(Rows(), 4)
        self.lock = held_lock()


class LoadsLocked(Small):
    warns = r"not part of snapshots: loaders\.training\.lock, a lock\. If"

    def train_dataloader(self) -> Any:
        return LockedLoader()


class Tailored(DataLoader[Tensor]):
    """A loader with an iterator of its own."""

    def _get_iterator(self) -> Any:
        return iter([torch.ones(4, 2)])


class LoadsTailored(Small):
    def train_dataloader(self) -> Any:
        return Tailored(Rows(), 4)


class Forked(Small):
    """Changes data and collate_fn while workers read: they have them as they were when the epoch began."""

    persistent = False

    def build(self) -> None:
        self.loader = DataLoader(
            Rows(), 8, shuffle=True, num_workers=1, collate_fn=torch.stack, persistent_workers=self.persistent
        )

    def factor(self, batch: Tensor) -> Any:
        rows: Any = self.loader.dataset
        rows.scale *= 1.3
        rows.seen = [*getattr(rows, "seen", []), rows.scale]
        self.loader.collate_fn = stacked if int(self.global_step) else torch.stack
        return 1.0


class ForkedOnce(Forked):
    """Workers that stay have what the run began with."""

    persistent = True


def stacked(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows) + 1


class Told(IterableDataset[Tensor]):
    """A stream that training tells what to give, read by one shard or by several."""

    def __init__(self, shards: int = 0) -> None:
        self.virtual_shards = shards
        self.scale, self.told = 1.0, [1.0]

    def __iter__(self) -> Any:
        info = get_worker_info()
        for row in Rows().rows[info.id :: info.num_workers] if info else Rows().rows:
            yield row * self.scale + sum(self.told)


class TellsStream(Small):
    """Tells a stream, in and on it, while it is read: it goes on as it was when the epoch began."""

    def build(self) -> None:
        self.loader = DataLoader(self.stream(), 4, collate_fn=torch.stack)

    def stream(self) -> Any:
        return Told()

    def factor(self, batch: Tensor) -> Any:
        told: Any = self.loader.dataset
        for one in getattr(told, "datasets", [told]):
            one.scale *= 1.3
            one.told.append(one.scale)
            one.later = one.scale
        self.loader.collate_fn = stacked if int(self.global_step) else torch.stack
        return 1.0


class TellsShards(TellsStream):
    def stream(self) -> Any:
        return Told(shards=3)


class TellsChain(TellsStream):
    def stream(self) -> Any:
        return ChainDataset([Told(), Told()])


class TellsStreamOfWorker(TellsStream):
    """And worker_init_fn is another one from the second epoch on."""

    def build(self) -> None:
        self.loader = DataLoader(Told(), 8, num_workers=1, collate_fn=torch.stack)

    def factor(self, batch: Tensor) -> Any:
        self.loader.worker_init_fn = scaled
        return super().factor(batch)


def scaled(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.scale *= 3


class TellsBetweenEpochs(TellsStream):
    """Tells workers that stay, and have never heard of it."""

    def build(self) -> None:
        self.loader = DataLoader(Told(), 8, num_workers=1, collate_fn=torch.stack, persistent_workers=True)

    def on_train_epoch_end(self) -> None:
        super().factor(torch.ones(1))

    def factor(self, batch: Tensor) -> Any:
        return 1.0


class LockedStream(Told):
    """A stream that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class TellsLockedStream(TellsStream):
    warns = r"LockedStream: \S+ has changed since the epoch began, which reads the data as they were then\. A run"

    def stream(self) -> Any:
        return LockedStream()


class OfModule(Rows):
    def __init__(self, module: Small) -> None:
        super().__init__()
        self.module = module

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + self.module.layer.weight.detach()[0]


class ReadsItselfInWorkers(Small):
    warns = r"the workers of the train loader read the module as it was when they were started \(module\)\. A run"

    def train_dataloader(self) -> Any:
        return DataLoader(OfModule(self), 4, num_workers=1)


class Worded(Rows):
    """Numbers what it reads by when it first met it, and counts its readings, which is seen after some."""

    def __init__(self, after: float = float("inf")) -> None:
        super().__init__()
        self.numbers: dict[int, int] = {}
        self.reads, self.after = 0, after

    def __getitem__(self, index: int) -> Tensor:
        self.reads += 1
        number = self.numbers.setdefault(index % 5, len(self.numbers)) if self.after == float("inf") else 0
        return self.rows[index] + number + (self.reads > self.after)


class Longest:
    """Makes batches that depend on the largest value so far."""

    longest = 0.0

    def __call__(self, rows: list[Tensor]) -> Tensor:
        self.longest = max(self.longest, float(torch.stack(rows).max()))
        return torch.stack(rows) * self.longest


class Remembers(Small):
    """Data and collate remember what they have read: state, where they are read in the main process."""

    workers, collate, after = 0, Longest, float("inf")

    def train_dataloader(self) -> Any:
        return DataLoader(Worded(self.after), 4, shuffle=True, num_workers=self.workers, collate_fn=self.collate())


class RemembersInWorkers(Remembers):
    refused = r"of Worded returned another batch than without earlier reads: .* \(data set/\w+"
    workers, collate = 1, lambda self: None


class CollatesToLongest(Remembers):
    refused = r"Longest of Worded returned another batch than .* \(\S+"
    workers, after = 1, 1e9


class Ordered(Small):
    """The sampler is a list that training turns."""

    def build(self) -> None:
        self.order = [3, 1, 2, 5, 6, 7, 8, 9]

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(), 2, sampler=self.order)

    def factor(self, batch: Tensor) -> Any:
        order: Any = self.trainer.train_dataloader.sampler
        order.append(order.pop(0))
        return 1.0


def scaled_by(rows: list[Tensor], by: float) -> Tensor:
    return torch.stack(rows) * by


class Recollated(Small):
    """A collate_fn is made anew of the one before; a pass goes on with that it began with."""

    def build(self) -> None:
        self.loader = DataLoader(Rows(), 8, shuffle=True, collate_fn=partial(scaled_by, by=1.0))

    def factor(self, batch: Tensor) -> Any:
        before: Any = self.loader.collate_fn
        self.loader.collate_fn = partial(scaled_by, by=before.keywords["by"] * 1.5)
        return 1.0


class LevelRows(Rows):
    def __init__(self, level: float) -> None:
        super().__init__()
        self.level = level

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) * self.level


class Levelled(Small):
    """Sets up a data set, and sets it in training."""

    def __init__(self, level: float = 1.0) -> None:
        super().__init__()
        self.loader = DataLoader(LevelRows(level), 4, shuffle=True)

    def factor(self, batch: Tensor) -> Any:
        rows: Any = self.loader.dataset
        rows.level = 2.0
        return 1.0
