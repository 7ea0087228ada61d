"""Families of loaders, as programs have them: undisturbed and killed within a pass, in forks of one process."""

import importlib
import itertools
import json
import os
import random
import traceback
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from laws.prepared import life
from laws.stream_packages import numbered, tars
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from midstride.engine import Trainer, TrainingModule
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.session.replay_plan import NEVER
from midstride.engine.world import World

#: batches of four samples in an epoch of each rank
BATCHES = 4
#: number of ranks -> step and phase in which each run dies: within its first pass, or its second one
DEATHS = {1: (3, "backward"), 2: (7, "fetch")}


def mine() -> list[int]:
    """Return the samples of this rank."""
    world = World.from_environment()
    return [*range(world.rank, every(), world.size)]


def every() -> int:
    """Return the number of samples of all ranks."""
    return 4 * BATCHES * World.from_environment().size


class Numbers(Dataset[Tensor]):
    """Numbered samples, with noise."""

    def __init__(self, indices: list[int] | None = None) -> None:
        self.indices = [*range(every())] if indices is None else indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, at: int) -> Tensor:
        return self.indices[at] + torch.rand(1)


class Stream(IterableDataset[Tensor]):
    """The samples of a rank; without end, or more of them on the first rank."""

    def __init__(self, *, endless: bool = False, uneven: bool = False) -> None:
        more = mine()[:5] if uneven and World.from_environment().is_first else []
        self.indices, self.endless = mine() + more, endless

    def __iter__(self) -> Iterator[Tensor]:
        for index in itertools.cycle(self.indices) if self.endless else self.indices:
            yield index + torch.rand(1)


class ByTokens(Sampler[list[int]]):
    """Batches of other sizes in each epoch, from a generator of its own."""

    def __init__(self) -> None:
        self.draw = random.Random(3)

    def __iter__(self) -> Iterator[list[int]]:
        rest = [*range(every())]
        self.draw.shuffle(rest)
        while rest:
            yield [rest.pop() for _ in range(min(len(rest), self.draw.randint(2, 5)))]


class Running(Sampler[int]):
    """Draws from a generator that began when it was made, as the samplers of mmengine do."""

    def __init__(self) -> None:
        self.samples, self.indices = every(), self.endless()

    def endless(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(5)
        while True:
            yield from torch.randperm(self.samples, generator=generator).tolist()

    def __iter__(self) -> Iterator[int]:
        yield from self.indices


class Ahead:
    """Prefetches a batch and scales it, as the loader of timm does."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Tensor]:
        before = None
        for batch in self.loader:
            if before is not None:
                yield before * 2
            before = batch
        if before is not None:
            yield before * 2


class Forever:
    """Continues one iterator over its epochs, as timm's loader for several epochs does."""

    def __init__(self, loader: Any) -> None:
        self.iterator = itertools.chain.from_iterable(itertools.repeat(loader))

    def __iter__(self) -> Iterator[Tensor]:
        return itertools.islice(self.iterator, BATCHES)


class Pipeline:
    """Its own iterator, which starts over when it has ended or is told so, as those of DALI do."""

    def __init__(self) -> None:
        self.indices, self.at, self.draw = mine(), 0, random.Random(9)

    def __iter__(self) -> "Pipeline":
        return self

    def __next__(self) -> dict[str, Tensor]:
        if self.at == BATCHES:
            self.reset()
            raise StopIteration
        self.at += 1
        return {"data": torch.tensor([self.draw.choice(self.indices) + 0.5 for _ in range(4)])}

    def reset(self) -> None:
        self.at = 0


class Neighbours(DataLoader[Any]):
    """Collates indices by a method that draws, and passes each batch on in `_get_iterator`, as PyG's loaders do."""

    def __init__(self) -> None:
        super().__init__(mine(), 4, shuffle=True, num_workers=1, collate_fn=self.sample)  # type: ignore[arg-type]

    def sample(self, indices: list[int]) -> Tensor:
        return torch.tensor(indices) + torch.randint(0, 9, (len(indices),))

    def _get_iterator(self) -> Any:
        return map(self.placed, super()._get_iterator())

    def placed(self, batch: Tensor) -> Tensor:
        return batch / 2


class Stated:
    """Says how many batches it gave."""

    def __init__(self) -> None:
        self.indices, self.at = mine(), 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.at < BATCHES:
            self.at += 1
            yield torch.tensor(self.indices[4 * self.at - 4 : 4 * self.at]) + torch.rand(1)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"] % BATCHES


def of_datasets(*, streaming: bool = False) -> Any:
    import datasets
    from datasets.distributed import split_dataset_by_node

    whole = datasets.Dataset.from_dict({"x": [*range(every())]}).with_format("torch")
    if not streaming:
        return DataLoader(whole, 4, shuffle=True)
    world = World.from_environment()
    stream = whole.to_iterable_dataset(num_shards=4).shuffle(seed=5, buffer_size=6)
    return DataLoader(split_dataset_by_node(stream, world.rank, world.size), 4)


def of_webdataset(folder: Path) -> Any:
    import webdataset as wds

    stream = wds.WebDataset(tars(folder), shardshuffle=False, nodesplitter=wds.split_by_node)
    return wds.WebLoader(stream.shuffle(5, rng=random.Random(5)).map(numbered), batch_size=4).with_epoch(BATCHES)


def of_accelerate() -> Any:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    options = DataLoaderConfiguration(dispatch_batches=True, split_batches=False)
    return Accelerator(cpu=True, dataloader_config=options).prepare_data_loader(DataLoader(Numbers(), 4, shuffle=True))


def of_torchdata(*, nodes: bool) -> Any:
    from torchdata import nodes as made
    from torchdata.stateful_dataloader import StatefulDataLoader

    if not nodes:
        return StatefulDataLoader(Numbers(mine()), batch_size=4, shuffle=True, num_workers=1)
    sampler = RandomSampler(mine(), generator=torch.Generator().manual_seed(2))
    return made.Loader(made.Batcher(made.MapStyleWrapper(Numbers(mine()), sampler), 4))


#: in an order in which those that share their samples among nodes have an even number: it is of two ranks
ROWS: dict[str, Callable[[Path], Any]] = {
    "map-style": lambda _: DataLoader(Numbers(), 4, shuffle=True, num_workers=2),
    "iterable": lambda _: DataLoader(Stream(), 4, num_workers=2),
    "batches by tokens": lambda _: DataLoader(Numbers(), batch_sampler=ByTokens()),
    "a running generator": lambda _: DataLoader(Numbers(), 4, sampler=Running()),
    "persistent workers": lambda _: DataLoader(Numbers(), 4, shuffle=True, num_workers=1, persistent_workers=True),
    "persistent workers in a loader": lambda _: Ahead(
        DataLoader(Numbers(mine()), 4, shuffle=True, num_workers=1, persistent_workers=True)
    ),
    "no end": lambda _: DataLoader(Stream(endless=True), 4),
    "unequal lengths": lambda _: DataLoader(Stream(uneven=True), 4),
    "timm, prefetching": lambda _: Ahead(DataLoader(Numbers(mine()), 4, shuffle=True, num_workers=1)),
    "timm, several epochs": lambda _: Forever(DataLoader(Numbers(mine()), 4, shuffle=True)),
    "DALI": lambda _: Pipeline(),
    "datasets, streaming": lambda _: of_datasets(streaming=True),
    "PyG": lambda _: Neighbours(),
    "webdataset": of_webdataset,
    "a class with state": lambda _: Stated(),
    "accelerate, dispatching": lambda _: of_accelerate(),
    "datasets, map-style": lambda _: of_datasets(),
    "a generator function": lambda _: lambda: iter(DataLoader(Numbers(mine()), 4, shuffle=True)),
    "torchdata": lambda _: of_torchdata(nodes=False),
    "torchdata, nodes": lambda _: of_torchdata(nodes=True),
}
OPTIONS = {"no end": {"limit_train_batches": BATCHES}, "a running generator": {"limit_train_batches": BATCHES}}
LIBRARIES = {"torchdata": "torchdata", "torchdata, nodes": "torchdata"}


class Net(TrainingModule):
    """Notes every number that it sees, and how it weighs."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(1, 1), list[Any]()
        self.name, self.folder = name, folder

    def train_dataloader(self) -> Any:
        return ROWS[self.name](self.folder)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        leaves = [leaf for leaf in pytree.tree_leaves(batch) if not isinstance(leaf, str)]
        values = torch.cat([torch.as_tensor(leaf).flatten().float() for leaf in leaves])
        self.seen.append([float(self.layer.weight), *values.tolist()])
        loss: Tensor = self.layer(values[:, None] / 1e3).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def train(name: str, folder: Path, every_steps: int) -> None:
    """Train from wherever the run in `folder` stands, and write what it has seen."""
    world = World.from_environment()
    strategy = "single" if world.size == 1 else "ddp"
    options: dict[str, Any] = {
        "enable_progress_bar": False,
        "snapshots": {"every_steps": every_steps},
        **OPTIONS.get(name, {}),
    }
    trainer = Trainer(strategy=strategy, max_epochs=2, seed=7, **options)
    module = Net(name, folder.parents[1])
    trainer.fit(module, run=folder / "run")
    (folder / f"{world.rank}.json").write_text(json.dumps(module.seen))


def live_all(folder: Path, cells: list[tuple[str, int]]) -> None:
    """Give every cell, a row and a number of ranks, its lives; how they ended goes to a file."""
    warnings.simplefilter("ignore")
    for library in ("accelerate", "datasets", "webdataset"):
        importlib.import_module(library)  # here, and not in each life
    for name in World().environment:
        os.environ.pop(name, None)
    tars(folder)
    for name, ranks in cells:
        if find_spec(LIBRARIES.get(name, "torch")) is None:
            continue
        told: dict[str, Any] = {}
        at = folder / f"{name} {ranks}"
        try:
            calm, plan = FaultPlan(at / "calm"), FaultPlan(at / "plan")
            step, phase = DEATHS[ranks]
            plan.add("kill", step=step, phase=phase, rank=ranks - 1)
            codes = [life(calm, train, name, at / "undisturbed", NEVER, ranks=ranks)]
            codes += [life(plan, train, name, at / "killed", 2, ranks=ranks) for _ in range(2)]
            plan.assert_all_fired()
            told["codes"] = codes
        except BaseException:
            told["error"] = traceback.format_exc()
        (folder / f"{name} {ranks}.json").write_text(json.dumps(told))
