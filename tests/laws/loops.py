"""Loops of a user's own, each written once and run twice: with `Loop`, and with plain PyTorch in its place."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from laws.plain import rank_seed, seed_everything
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset, default_collate

SEED, SAMPLES, BATCH = 7, 48, 4


class Deaths:
    """Kills this process at the planned visits of its places, each once over all attempts.

    Args:
        folder: holds a mark for each death.
        planned: rank, place and number of its visit in the attempt, from 1.
    """

    def __init__(self, folder: Path, planned: list[tuple[int, str, int]]) -> None:
        self._folder, self._planned, self._visits = folder, planned, dict[str, int]()

    def at(self, place: str) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._visits[place] = self._visits.get(place, 0) + 1
        for number, planned in enumerate(self._planned):
            mark = self._folder / f"death-{number}"
            if planned == (rank, place, self._visits[place]) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)


class Net(nn.Module):
    """Registered in another order than it is used; dropout and batch norm."""

    def __init__(self, deaths: Deaths) -> None:
        super().__init__()
        self.last = nn.Linear(5, 3)
        self.layers = nn.ModuleList([nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 5)])
        self.drop = nn.Dropout(0.3)
        self._die = deaths.at

    def forward(self, x: Tensor) -> Tensor:
        self._die("forward")
        first, norm, middle = self.layers
        return self.last(torch.relu(middle(self.drop(torch.relu(norm(first(x)))))))


class Read(Dataset[Any]):
    def __init__(self, deaths: Deaths) -> None:
        drawn = torch.Generator().manual_seed(1)
        x = torch.randn(SAMPLES, 6, generator=drawn)
        self._inner, self._die = TensorDataset(x, x[:, :3].argmax(1)), deaths.at

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self._die("fetch")
        return self._inner[index]


class Stream(IterableDataset[Any]):
    def __init__(self, deaths: Deaths) -> None:
        self._read = Read(deaths)

    def __iter__(self) -> Iterator[Any]:
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return (self._read[index] for index in range(rank, SAMPLES, size))


class Own:
    """A loader that is no DataLoader: it draws an order in each pass, and counts the passes."""

    def __init__(self, deaths: Deaths) -> None:
        self._read, self._drawn, self._passes = Read(deaths), torch.Generator().manual_seed(5), 0

    def __iter__(self) -> Iterator[Any]:
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._passes += 1
        for indices in torch.randperm(SAMPLES, generator=self._drawn)[rank::size].split(BATCH):
            x, y = default_collate([self._read[index] for index in indices.tolist()])
            yield x + self._passes / 10, y


class PlainLoader:
    """The batches of a rank in the order of DistributedSampler."""

    def __init__(self, loader: DataLoader[Any], number: int) -> None:
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._loader, self._pass = loader, 0
        if not isinstance(loader.dataset, IterableDataset):
            seed = rank_seed(SEED, number) % 2**32 if number else SEED
            self._sampler = DistributedSampler(loader.dataset, size, rank, seed=seed)
            self._loader = DataLoader(loader.dataset, loader.batch_size, sampler=self._sampler)
            self._loader.generator = torch.Generator()
        else:
            self._loader.generator = torch.Generator()

    def __iter__(self) -> Iterator[Any]:
        if not isinstance(self._loader.dataset, IterableDataset):
            self._sampler.set_epoch(self._pass)
        self._pass += 1
        return iter(self._loader)


class PlainLoop:
    """What a script does without `Loop`."""

    def __init__(self, ranks: int) -> None:
        seed_everything(SEED)
        self.state, self._loaders, self._ranks = SimpleNamespace(), 0, ranks

    def keep(self, **named: Any) -> None:
        if self._ranks > 1:
            seed_everything(rank_seed(SEED, dist.get_rank()))

    def loader(self, loader: Any) -> Any:
        self._loaders += 1
        return PlainLoader(loader, self._loaders - 1) if isinstance(loader, DataLoader) else loader

    def epochs(self, count: int) -> Iterator[int]:
        return iter(range(count))

    def steps(self, loader: PlainLoader, count: int) -> Iterator[Any]:
        done = 0
        while True:
            for batch in loader:
                yield batch
                done += 1
                if done == count:
                    return

    def ddp(self, module: nn.Module) -> nn.Module:
        return DistributedDataParallel(module) if self._ranks > 1 else module

    def shard(self, module: nn.Module) -> nn.Module:
        for layer in module.layers:
            fully_shard(layer)
        return fully_shard(module)

    def log(self, name: str, value: Any) -> None:
        pass


def train(model: nn.Module, optimizer: Any, batch: Any, deaths: Deaths, *, steps: bool = True) -> Tensor:
    x, y = batch
    loss = cross_entropy(model(x + 0.1 * torch.randn_like(x)), y)
    deaths.at("backward")
    loss.backward()
    if steps:
        deaths.at("step")
        optimizer.step()
        optimizer.zero_grad()
    deaths.at("between")
    return loss


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader[Any], deaths: Deaths) -> float:
    model.eval()
    losses = []
    for x, y in loader:
        deaths.at("validation")
        losses.append(cross_entropy(model(x), y).item())
    model.train()
    return sum(losses) / len(losses)


def in_epochs(loop: Any, model: nn.Module, optimizer: Any, schedule: Any, data: Any, deaths: Deaths) -> None:
    is_shuffled = not isinstance(data, IterableDataset)
    batches = loop.loader(data if isinstance(data, Own) else DataLoader(data, BATCH, shuffle=is_shuffled))
    held = DataLoader(Read(deaths), 16, generator=torch.Generator())
    loop.state.best = float("inf")
    for epoch in loop.epochs(3):
        loop.state.total = torch.rand(()).item()
        for index, batch in enumerate(batches):
            loss = train(model, optimizer, batch, deaths)
            loop.state.total += loss.item() * (index + 1)
            loop.log("train/loss", loss)
            loop.log("index", index)
        schedule.step()
        loop.log("val/loss", evaluate(model, held, deaths))
        loop.log("last", loss.item() + epoch)
        loop.state.best = min(loop.state.best, loop.state.total)
        deaths.at("epoch end")


def in_steps(loop: Any, model: nn.Module, optimizer: Any, schedule: Any, data: Any, deaths: Deaths) -> None:
    batches = loop.loader(DataLoader(data, BATCH, shuffle=True))
    for index, batch in enumerate(loop.steps(batches, 17)):
        loop.log("train/loss", train(model, optimizer, batch, deaths))
        loop.log("index", index)
        if index % 5 == 4:
            schedule.step()
            loop.log("val/loss", evaluate(model, DataLoader(data, 16, generator=torch.Generator()), deaths))
            deaths.at("epoch end")


def accumulated(loop: Any, model: nn.Module, optimizer: Any, schedule: Any, data: Any, deaths: Deaths) -> None:
    batches = loop.loader(DataLoader(data, BATCH, shuffle=True))
    for _ in loop.epochs(2):
        optimizer.zero_grad()
        for index, batch in enumerate(batches):
            loop.log("train/loss", train(model, optimizer, batch, deaths, steps=index % 3 == 2))
        schedule.step()
        evaluate(model, DataLoader(data, 16, generator=torch.Generator()), deaths)
        deaths.at("epoch end")


def from_two(loop: Any, model: nn.Module, optimizer: Any, schedule: Any, data: Any, deaths: Deaths) -> None:
    first = loop.loader(DataLoader(data, BATCH, shuffle=True))
    second = loop.loader(DataLoader(Read(deaths), BATCH - 1, shuffle=True))
    for _ in loop.epochs(2):
        for (x, y), (u, v) in zip(first, second, strict=False):
            loop.log("train/loss", train(model, optimizer, (torch.cat([x, u]), torch.cat([y, v])), deaths))
        schedule.step()
        evaluate(model, DataLoader(data, 16, generator=torch.Generator()), deaths)
        deaths.at("epoch end")


def streamed(loop: Any, model: nn.Module, optimizer: Any, schedule: Any, data: Any, deaths: Deaths) -> None:
    in_epochs(loop, model, optimizer, schedule, Stream(deaths), deaths)


def from_own(loop: Any, model: nn.Module, optimizer: Any, schedule: Any, data: Any, deaths: Deaths) -> None:
    in_epochs(loop, model, optimizer, schedule, Own(deaths), deaths)


def of_tensors(loop: Any, model: nn.Module, optimizer: Any, schedule: Any, data: Any, deaths: Deaths) -> None:
    """Train tensors of no module too, by gradients that three steps add up."""
    scale, table = torch.ones((), requires_grad=True), {"shift": torch.zeros((), requires_grad=True)}
    second = torch.optim.Adam([{"params": [scale]}, {"params": [table["shift"]], "lr": 0.03}], lr=0.05)
    loop.keep(scale=scale, table=table, second=second)
    batches = loop.loader(DataLoader(data, BATCH, shuffle=True))
    for index, (x, y) in enumerate(loop.steps(batches, 17)):
        loop.log("train/loss", train(model, optimizer, (x * scale + table["shift"], y), deaths))
        if index % 3 == 2:
            second.step()
            second.zero_grad()
        if index % 5 == 4:
            evaluate(model, DataLoader(data, 16, generator=torch.Generator()), deaths)
            deaths.at("epoch end")
    loop.state.trained = [scale.detach(), table["shift"].detach(), second.state_dict()["state"]]


SHAPES: dict[str, Callable[..., None]] = {
    "epochs": in_epochs,
    "steps": in_steps,
    "accumulation": accumulated,
    "two loaders": from_two,
    "stream": streamed,
    "own loader": from_own,
    "tensors": of_tensors,
}
#: world -> number of ranks, and how the module is wrapped, given the loop
WORLDS: dict[str, tuple[int, Callable[[Any, nn.Module], nn.Module]]] = {
    "one process": (1, lambda loop, module: module),
    "loop.ddp": (3, lambda loop, module: loop.ddp(module)),
    "own DDP": (3, lambda loop, module: DistributedDataParallel(module)),
    "sharded": (3, lambda loop, module: loop.shard(module)),
}


def run_loop(shape: str, world: str, folder: Path, planned: list[tuple[int, str, int]], *, plain: bool = False) -> None:
    """Run a loop in this rank to its end, and write what it ends with."""
    ranks, wrap = WORLDS[world]
    if ranks > 1:
        dist.init_process_group("gloo")
    torch.use_deterministic_algorithms(True)
    deaths = Deaths(folder, planned)
    if plain:
        loop: Any = PlainLoop(ranks)
    else:
        from midstride.engine import Loop

        loop = Loop(folder / "run", seed=SEED, snapshots={"every_steps": 3}, enable_progress_bar=False)
    module = Net(deaths)
    model = wrap(loop, module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    loop.keep(model=model, optimizer=optimizer, schedule=schedule)
    SHAPES[shape](loop, model, optimizer, schedule, Read(deaths), deaths)
    ended = {
        "weights": {name: _own(tensor) for name, tensor in module.state_dict().items()},
        "optimizer": [{key: _own(value) for key, value in state.items()} for state in optimizer.state.values()],
        "rates": schedule.get_last_lr(),
        "drawn": torch.get_rng_state(),
        "state": vars(loop.state),
    }
    torch.save(ended, folder / f"ended-{dist.get_rank() if ranks > 1 else 0}.pt")


def _own(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()
