"""State in callbacks, data sets and DataModules."""

import weakref
from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.nn.utils.prune
from laws.objects.small import Rows, Small, held_lock
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, SequentialSampler, Subset, TensorDataset

from midstride.engine import Callback, DataModule


class Forgetful(Callback):
    """Acts on what it counts, and has no state_dict."""

    def __init__(self, module_tensor: bool = False) -> None:
        self.batches = 0
        self.seen: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1
        self.seen.append(batch_idx)
        trainer.optimizers[0].param_groups[0]["lr"] = 0.1 / (self.batches + sum(self.seen))


#: the argument of a Trainer, as a script has it
LISTED: list[Callback] = [Forgetful()]


class OpenRow(Callback):
    """Acts on rows whose last one goes on to grow: its state has that one twice."""

    def __init__(self) -> None:
        self.row: dict[str, int] = {"batches": 0}
        self.rows = [self.row]

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.row["batches"] += 1
        trainer.optimizers[0].param_groups[0]["lr"] = 0.1 / sum(row["batches"] for row in self.rows)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "row": self.row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows, self.row = state_dict["rows"], state_dict["row"]


class Curriculum(Callback):
    """Tells the data set what to give."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.dataset.scale *= 1.5


class Watching(Small):
    """The data set reads what the module counts, in a deque that both have; a callback tells the data set."""

    def build(self) -> None:
        self.recent: deque[float] = deque([1.0], maxlen=3)
        self.dataset = Reading(self.recent)

    def factor(self, batch: Tensor) -> Any:
        self.recent.append(float(len(self.recent)))
        return 1 + sum(self.recent)

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset, 4, shuffle=True)


class Reading(Rows):
    def __init__(self, recent: deque[float]) -> None:
        super().__init__()
        self.recent = recent

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + sum(self.recent)


class Counting(DataModule):
    """Its own counter, moved by the module."""

    def __init__(self) -> None:
        self.told = 0
        self.dataset = Rows()

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset, 4, shuffle=True)


class Wrapped(DataModule):
    """Torch's own data sets, of which none is an attribute, around one of the user's."""

    def train_dataloader(self) -> Any:
        return DataLoader(Subset(ConcatDataset([Rows(), Rows()]), range(30)), 4, shuffle=True)


class TellingWrapped(Small):
    def factor(self, batch: Tensor) -> Any:
        data = self.trainer.last_fit.context.loaders.training.source.dataset.dataset.datasets[1]
        data.scale *= 1.5
        return data.scale


class Opened(DataModule):
    """Data, their module and a sampler hold what no file can."""

    def __init__(self) -> None:
        self.locks = [held_lock(), held_lock()]

    def train_dataloader(self) -> Any:
        rows: Any = Rows()
        rows.file = Path(__file__).open()  # noqa: SIM115
        weakref.finalize(rows, rows.file.close)
        return DataLoader(rows, 4, sampler=LockedSampler(range(24)))


class LockedSampler(SequentialSampler):
    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.lock = held_lock()

    def __deepcopy__(self, memo: Any) -> Any:
        return LockedSampler(self.data_source)


class LockedCallback(Callback):
    def __init__(self) -> None:
        self.lock = held_lock()


class OfTensors(DataModule):
    def __init__(self) -> None:
        self.dataset = TensorDataset(torch.ones(24, 2))

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset, 4, collate_fn=lambda rows: torch.stack([row for (row,) in rows]))


class WritesTensors(Small):
    def factor(self, batch: Tensor) -> Any:
        self.trainer.last_fit.context.loaders.training.source.dataset.tensors[0].mul_(1.1)
        return 1.0


class Telling(Small):
    def train_dataloader(self) -> Any:
        return None

    def factor(self, batch: Tensor) -> Any:
        data = self.trainer.last_fit.context.loaders.training.source.dataset
        data.told = getattr(data, "told", 0) + 1
        data.scale = 1 + data.told / 10
        return data.told


class Ordered(Rows):
    """Data that hold a dict, whose order decides."""

    def __init__(self) -> None:
        super().__init__()
        self.order = dict(a=1, b=2, c=3)


class Reordered(Small):
    """Changes nothing of the data but an order."""

    def train_dataloader(self) -> Any:
        return DataLoader(Ordered(), 4, shuffle=True)

    def factor(self, batch: Tensor) -> Any:
        order = self.trainer.last_fit.context.loaders.training.source.dataset.order
        first = next(iter(order))
        order[first] = order.pop(first)
        return order[next(iter(order))]


class Pruned(Small):
    refused = "the parameter layer.weight existed when training started"

    def factor(self, batch: Tensor) -> Any:
        if not hasattr(self.layer, "weight_mask"):
            nn.utils.prune.l1_unstructured(self.layer, "weight", 1)
        return 1.0


class Opening(Small):
    """None first, and what no file can hold later."""

    warns = "attribute numbers, a generator, is not part of snapshots"

    def build(self) -> None:
        self.numbers: Any = None

    def factor(self, batch: Tensor) -> Any:
        self.numbers = self.numbers or (number for number in range(1, 100))
        return next(self.numbers)


class ActsOtherwise(Small):
    warns = r"a value that no snapshot can hold: module\.act \(now .*tanh"

    def build(self) -> None:
        self.act: Any = torch.relu

    def factor(self, batch: Tensor) -> Any:
        self.act = torch.tanh
        return 1 + self.act(batch).mean()


class CountsOnClass(Small):
    warns = r"part of no snapshot: class CountsOnClass: calls \(0, now 1"
    calls = 0

    def factor(self, batch: Tensor) -> Any:
        CountsOnClass.calls += 1
        return self.calls


class CountingCollate:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, rows: list[Tensor]) -> Tensor:
        self.calls += 1
        return torch.stack(rows) * self.calls


class CountsInCollate(Small):
    refused = "CountingCollate returned another batch"

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(), 4, shuffle=True, collate_fn=CountingCollate())


class CountsInWorker(Small):
    refused = "CountingCollate returned another batch"

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(), 4, shuffle=True, collate_fn=CountingCollate(), num_workers=1)


class KeepingRows(Rows):
    """Keeps what it drew for a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Tensor] = {}

    def __getitem__(self, index: int) -> Tensor:
        if index not in self.kept:
            self.kept[index] = super().__getitem__(index) + torch.rand(2)
        return self.kept[index]


class KeepsDraws(Small):
    refused = "KeepingRows draws random numbers when it is f"

    def train_dataloader(self) -> Any:
        return DataLoader(KeepingRows(), 4, shuffle=True)
