"""State in objects of libraries whose attributes are all of it: transforms, collate functions, data sets, metrics."""

import io
from typing import Any

import numpy as np
import torch
from laws.objects.small import Rows, Small
from sklearn.tree import DecisionTreeRegressor
from support.libraries import library
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

augment = library("augment")


class Augmented(Dataset[Tensor]):
    """The user's samples, seen through a library's transforms."""

    def __init__(self) -> None:
        self.rows, self.transform = Rows().rows, augment.Compose([augment.Scale(0.5), augment.Slotted(0.1)])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.transform(self.rows[index])


class ClosesMosaic(Small):
    """Switches a transform off, and puts another in its place."""

    workers = 0

    def build(self) -> None:
        self.loader = DataLoader(self.data(), 4, shuffle=True, num_workers=self.workers)

    def data(self) -> Any:
        return Augmented()

    def factor(self, batch: Tensor) -> Any:
        if self.global_step in (1, 3):
            self.change(self.loader)
        return 1.0

    def change(self, loader: Any) -> None:
        step = int(self.global_step)
        transform = loader.dataset.transform
        transform.transforms[0].p, transform.transforms[0].mode = step % 3, augment.Mode.EDGE
        transform.transforms[1] = augment.Slotted(0.3 * step)


class ClosesMosaicForWorkers(ClosesMosaic):
    workers = 1


class ComposesAnew(ClosesMosaic):
    """A new transform, of a library's class, takes the place of another."""

    def change(self, loader: Any) -> None:
        loader.dataset.transform = augment.Compose([augment.Slotted(0.2 * int(self.global_step))])


class SetsTransform(ClosesMosaic):
    """A library's data set is told another transform."""

    def data(self) -> Any:
        return augment.Pictures(augment.Scale(0.5))

    def change(self, loader: Any) -> None:
        loader.dataset.set_transform(augment.Slotted(0.2 * int(self.global_step)))


class SetsTransformForWorkers(SetsTransform):
    workers = 1


class EndsMixup(ClosesMosaic):
    """A library's collate function mixes no more."""

    def build(self) -> None:
        mixup = augment.Mixup(0.3)
        self.loader = DataLoader(Rows(), 4, shuffle=True, num_workers=self.workers, collate_fn=mixup)

    def change(self, loader: Any) -> None:
        loader.collate_fn.mixup_enabled = self.global_step < 3
        loader.collate_fn.alpha *= 0.5


class EndsMixupForWorkers(EndsMixup):
    workers = 1


class Gathers(Small):
    """Metrics and settings of a library, one of which training makes."""

    def build(self) -> None:
        self.metric, self.config, self.scaler = augment.Metric(), augment.Config(scale=0.5), augment.Scaler()
        self.late: Any = None
        self.modes = {augment.Mode.ZERO: 0}

    def factor(self, batch: Tensor) -> Any:
        self.late = self.late or augment.Metric()
        for metric in (self.metric, self.late):
            metric(batch.detach().mean())
        self.config["scale"] += 0.1
        self.scaler.fit(batch.detach().sum())
        self.modes[augment.Mode.EDGE] = self.modes.get(augment.Mode.EDGE, 0) + 1
        seen = self.metric.aggregate() + self.late.aggregate()
        seen = seen + self.scaler.mean_
        return seen.abs() + self.config.scale + self.config.none + self.modes[augment.Mode.EDGE]


class TakenApart(Small):
    """What pickle links anew, takes apart, or makes again; a tree that training fits first."""

    def build(self) -> None:
        self.cache, self.late = augment.Cache(), None
        self.tree, self.bits = DecisionTreeRegressor(), {"draws": [np.random.PCG64(1)]}
        self.tape = io.BytesIO()

    def factor(self, batch: Tensor) -> Any:
        rows = batch.detach().numpy()
        before = float(self.tree.predict(rows)[0]) if self.global_step else 0.0
        self.tree.fit(rows, rows[:, 0])
        self.late = self.late or augment.Cache()
        used = [*self.cache.add(f"{self.global_step % 2}"), *self.late.add(f"{self.global_step % 3}")]
        self.tape.write(bytes([len(used)]))
        if self.global_step == 1:
            self.draws = np.random.default_rng(3)
            self.bits["of draws"] = [self.draws.bit_generator]
        drawn = self.bits["draws"][0].random_raw() % 97
        if self.global_step > 0:
            drawn += self.draws.random() + self.bits["of draws"][0].random_raw() % 89
        return before + sum((at + 1) * count for at, (_, count) in enumerate(used)) + sum(self.tape.getvalue()) + drawn


class MakesClass(Small):
    """A library's layer keeps a class that it makes when it is first called."""

    def build(self) -> None:
        self.head = augment.Head()

    def factor(self, batch: Tensor) -> Any:
        return self.head(batch).scale


class RegistersHooks(Small):
    """A library's layer registers a hook when it is first called, and notes that it has."""

    def build(self) -> None:
        self.recorder = augment.Recorder()

    def factor(self, batch: Tensor) -> Any:
        return 1 + self.recorder(batch)


class Unshares(Small):
    """Two parts of a library's layer share a list, until training gives one a list of its own."""

    def build(self) -> None:
        self.layers = augment.Sequential()

    def factor(self, batch: Tensor) -> Any:
        return self.layers(batch)


class Learns(Small):
    """Training makes objects of a library: with a function of its class, and with a state."""

    def build(self) -> None:
        self.leaves: list[Any] = []
        self.average, self.late = augment.Average([self.layer.weight]), None
        self.normal: Any = None

    def factor(self, batch: Tensor) -> Any:
        self.leaves.append(augment.Leaf())
        self.late = self.late or augment.Average([self.layer.bias])
        scale = 1.0 if self.normal is None else float(self.normal.scale.mean())
        self.normal = torch.distributions.Normal(self.layer(batch).detach(), scale + 0.5)
        learned = sum(leaf.learn(float(batch.abs().sum())) for leaf in self.leaves)
        return learned + self.average.update().abs() + self.late.update().abs() + scale
