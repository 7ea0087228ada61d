"""State that no snapshot holds, or that cannot be put back: it is named."""

import os
import threading
from typing import Any

import torch
import torch.nn.utils.prune
import torchmetrics
from laws.objects.optimizers import Numbered
from laws.objects.small import Rows, Small, held_lock
from support.libraries import library
from torch import Tensor, nn
from torch.utils.data import DataLoader

from midstride.engine import Callback

augment = library("augment")
CALLS = {"factor": 0}


class CountsInGlobal(Small):
    warns = r"part of no snapshot: global .*CALLS\['factor'\] \(0, now 1"

    def factor(self, batch: Tensor) -> Any:
        CALLS["factor"] += 1
        return CALLS["factor"]


class Averaged(nn.Module):
    """A user's module, which holds the layer of the run beside its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.of_run = nn.Linear(2, 1), nn.ModuleList()


class Counts(Callback):
    """A callback, and below a data set, that no trainer and no loader has."""

    steps = 0


class Replayed(Rows):
    scale = 1.0


AVERAGED, NORM, COUNTS, REPLAYED = Averaged(), nn.BatchNorm1d(2), Counts(), Replayed()
OPTIMIZERS = [torch.optim.SGD(AVERAGED.own.parameters(), lr=0.1, momentum=0.9)]
PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau(OPTIMIZERS[0])


class OfAGlobal(Small):
    """Holds in a module of the script's what the run holds, too: it says so of the other weights alone."""

    warns = r"snapshot: global \S+\.AVERAGED\.own\.weight \(float32\[1, 2\] \w+, now .*\.own\.bias \(.*\), global"
    warns += r" \S+\.OPTIMIZERS\[0\]\.param.*\.state\[0\] holds \(missing, now '1 items'\)"

    def build(self) -> None:
        AVERAGED.of_run.append(self.layer)

    def factor(self, batch: Tensor) -> Any:
        AVERAGED.own(batch).sum().backward()
        OPTIMIZERS[0].step()
        return 1.0


class StepsOfAGlobal(Small):
    warns = r"snapshot: global \S+\.PLATEAU\.last_epoch \(0, now 1\), \.best \(inf, now 1\.0\)"

    def factor(self, batch: Tensor) -> Any:
        PLATEAU.step(1.0)
        return 1.0


class OfALibrary(Small):
    """Only what changes is named of a library's module: its means, not its weights."""

    warns = r"snapshot: global \S+\.NORM\.running_mean \(.*\.running_var \(.*\.num_batches_tracked \(.*, now int64"

    def factor(self, batch: Tensor) -> Any:
        return NORM(batch).sum().detach()


class OfNoTrainer(Small):
    warns = r"COUNTS\.steps \(missing, now 1\), global \S+\.REPLAYED\.rows \(.*, \.scale \(1.0, now 2.0\)\. If"

    def factor(self, batch: Tensor) -> Any:
        COUNTS.steps, REPLAYED.scale = COUNTS.steps + 1, REPLAYED.scale * 2
        REPLAYED.rows[0] += 1
        return 1.0


class LargeRows(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.ones(1_000_000)


class Weighs(Small):
    warns = r"part of no snapshot: data\.training\.weights"

    def build(self) -> None:
        self.dataset = LargeRows()

    def factor(self, batch: Tensor) -> Any:
        self.dataset.weights *= 2
        return self.dataset.weights[0]

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset, 4, shuffle=True)


class Losing(Numbered):
    """Forgets the momentum it is given."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict({**state_dict, "state": {}})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["momentum"] = 0.9
        return super().step(closure)


class Loses(Small):
    refused = "the optimizers, after the first step, did not load"

    def configure_optimizers(self) -> Any:
        return Losing(self.parameters())


class Swaps(Small):
    refused = "replaced in training: SGD became Adam"

    def factor(self, batch: Tensor) -> Any:
        self.trainer.optimizers = [torch.optim.Adam(self.parameters())]
        return 1.0


class Deaf(Callback):
    """Is another one whenever it is given its state."""

    def __init__(self) -> None:
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"loads": self.loads}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.loads += 1


class Tally:
    """Counts, and is no value of its own."""

    def __init__(self) -> None:
        self.batches = 0


class Tallied(torchmetrics.SumMetric):
    """A metric that keeps an object beside its states."""

    def __init__(self) -> None:
        super().__init__()
        self.tally = Tally()

    def update(self, value: Any) -> None:
        self.tally.batches += 1
        super().update(value * self.tally.batches)


class Metered(Small):
    """What an object in a metric counts weighs what the metric sees, and so the loss."""

    def build(self) -> None:
        self.meter = Tallied()

    def factor(self, batch: Tensor) -> Any:
        self.meter.update(batch.detach().mean())
        self.log("seen", self.meter, on_step=False, on_epoch=True)
        return 1.0 + self.meter.tally.batches


class Clipped(torchmetrics.SumMetric):
    """Takes values in, and gives others out."""

    @property
    def seen(self) -> float:
        return self.__dict__.get("seen", 0.0)

    @seen.setter
    def seen(self, value: float) -> None:
        self.__dict__["seen"] = value + 1.0

    def update(self, value: Any) -> None:
        super().update(value)
        self.seen = 1.0


class Clips(Small):
    refused = "the metrics, after the first step, did not load the state that it saved"

    def build(self) -> None:
        self.meter = Clipped()

    def factor(self, batch: Tensor) -> Any:
        self.meter.update(batch.detach().mean())
        return 1.0


class LockedByRank(Small):
    """Holds another lock on all ranks but the first."""

    def build(self) -> None:
        self.lock = held_lock()
        if int(os.environ.get("RANK", "0")) > 0:
            self.other = held_lock()


class ReadsLate(Small):
    """Training makes an object of a library that no file can hold: a resumed run makes it again."""

    warns = r"the module's attribute link\.source, a generator, is not part of snapshots"

    def build(self) -> None:
        self.link: Any = None

    def factor(self, batch: Tensor) -> Any:
        self.link = self.link or augment.Source()
        return self.link.use()


class ReadsAsUserLate(ReadsLate):
    """The same, in an object of the user's."""

    warns = ReadsLate.warns

    def factor(self, batch: Tensor) -> Any:
        self.link = self.link or Source()
        return self.link.use()


class ReadsInListLate(ReadsLate):
    warns = r"the module's attribute link\.0\.0\.source, a generator, is not part of snapshots"

    def factor(self, batch: Tensor) -> Any:
        self.link = self.link or [(Source(), 3)]
        return self.link[0][0].use()


class ReadsInDictLate(ReadsLate):
    warns = r"the module's attribute links\.a\.source, a generator, is not part of snapshots"

    def build(self) -> None:
        self.links: dict[str, Any] = {}

    def factor(self, batch: Tensor) -> Any:
        if "a" not in self.links:
            self.links["a"] = augment.Source()
        return self.links["a"].use()


class Source:
    """An object of the user's with a Python generator."""

    def __init__(self) -> None:
        self.source, self.lock = (1.0 for _ in range(99)), threading.Lock()

    def use(self) -> float:
        with self.lock:
            return next(self.source)


class Rebuilt:
    """A simulator, here a Python generator, that its class starts again where it was."""

    def __init__(self) -> None:
        self.load_state_dict({"steps": 0})

    def step(self) -> float:
        self.steps, value = self.steps + 1, next(self.source)
        return value

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]
        self.source = (1.0 + step for step in range(self.steps, 99))


class RebuildsIt(Small):
    """No file can hold an attribute of the simulators, and their own methods restore it."""

    def build(self) -> None:
        self.simulators = {"first": Rebuilt(), "others": [Rebuilt()]}

    def factor(self, batch: Tensor) -> Any:
        held: Any = self.simulators
        return held["first"].step() + held["others"][0].step()


class Unable(Rebuilt):
    def state_dict(self) -> dict[str, Any]:
        return {"source": self.source}


class RebuildsNothing(Small):
    refused = r"Unable\.state_dict: 1 value of the state cannot be written"

    def build(self) -> None:
        self.simulator = Unable()

    def factor(self, batch: Tensor) -> Any:
        return self.simulator.step()
