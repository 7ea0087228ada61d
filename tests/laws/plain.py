"""The oracles of law 4: the same trainings as hand-written PyTorch scripts, with nothing of midstride in them.

(a) every rank seeds alike before the module is built, and with hash(seed, rank) after;
(b) DistributedSampler(seed) and set_epoch decide the order, with one replica for a single process;
(c) every DataLoader has a generator of its own;
(d) the data draw no random numbers.
"""

import os
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from laws.lives import Samples
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

SEED, EPOCHS, BATCH = 7, 2, 4


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rank_seed(seed: int, rank: int) -> int:
    """The number at `rank` of the generator splitmix64 (Steele, Lea and Flood 2014) that starts at `seed`."""
    mixed = (seed + (rank + 1) * 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return mixed ^ mixed >> 31


class Net(nn.Module):
    """Registration order is not use order; dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, 3)
        self.first = nn.Linear(6, 40)
        self.middle = nn.Linear(40, 5)
        self.norm = nn.BatchNorm1d(40)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.middle(self.drop(torch.relu(self.norm(self.first(x)))))))


def epochs(samples: int, rank: int, size: int, batch: int = BATCH) -> Iterator[DataLoader[Any]]:
    """Yield, for each epoch in turn, what a rank reads in it."""
    dataset = Samples(samples, noise=0.0)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, size, rank, seed=SEED)
    loader = DataLoader(dataset, batch, sampler=sampler, generator=torch.Generator())
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        yield loader


def _joined() -> tuple[int, int, Net]:
    """Join the other ranks; return this one, how many they are, and the net that all of them start with."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size > 1:
        dist.init_process_group("gloo")
    seed_everything(SEED)
    net = Net()
    seed_everything(rank_seed(SEED, rank))
    return rank, size, net


def plain(path: str, samples: int, window: int, clip: float | None, scaled: bool = False) -> None:
    """Train and save weights and optimizer state to `path`; called in each rank. `scaled`: in 16 bits."""
    rank, size, net = _joined()
    model: Any = DistributedDataParallel(net) if size > 1 else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    for loader in epochs(samples, rank, size):
        for index, (x, y, _) in enumerate(loader):
            closes = (index + 1) % window == 0 or index + 1 == len(loader)
            if size > 1:
                model.require_backward_grad_sync = closes
            with torch.autocast("cpu", torch.float16, enabled=scaled):
                loss = cross_entropy(model(x), y)
            scaler.scale(loss / window).backward()
            if closes:
                scaler.unscale_(optimizer)
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        scheduler.step()
    torch.save({"weights": net.state_dict(), "optimizer": optimizer.state_dict()}, f"{path}/rank-{rank}.pt")


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that evaluates a batch several times in a step, as often as the loss tells it to."""
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5, history_size=3, line_search_fn="strong_wolfe")


def plain_closure(path: str, samples: int, clip: float | None) -> None:
    """Train as `plain` does, with LBFGS."""
    rank, size, net = _joined()
    model: Any = DistributedDataParallel(net) if size > 1 else net
    optimizer = lbfgs(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for loader in epochs(samples, rank, size):
        for x, y, _ in loader:
            optimizer.step(partial(_evaluated, model, optimizer, x, y, clip))
            optimizer.zero_grad()
        scheduler.step()
    torch.save({"weights": net.state_dict(), "optimizer": optimizer.state_dict()}, f"{path}/rank-{rank}.pt")


def _evaluated(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, clip: float | None) -> float:
    """Return the loss over all ranks, by which they decide alike how the step goes on."""
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    if not dist.is_initialized():
        return loss.item()
    losses = [0.0] * dist.get_world_size()
    dist.all_gather_object(losses, loss.item())
    return sum(losses) / len(losses)


def plain_parts(path: str, samples: int, batch: int, parts: int, window: int) -> None:
    """Train with every batch split into parts, by hand: what dp does, and ddp2 with two ranks.

    Each part has its own mean and its own batch statistics; gradients are added in the order of the parts; the
    buffers are those of the first part. Over two ranks a sum has no order, so a plain all-reduce is DDP's.
    """
    rank, size, net = _joined()
    parameters = list(net.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for loader in epochs(samples, rank, size, batch):
        for index, (x, y, _) in enumerate(loader):
            if size > 1 and index % window == 0:  # as DDP: rank 0's buffers, wherever a window opens
                _broadcast_buffers(net)
            total = _summed_over_parts(net, x.chunk(parts), y.chunk(parts), window)
            for parameter, gradient in zip(parameters, total, strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            if (index + 1) % window == 0 or index + 1 == len(loader):
                if size > 1:
                    _average(parameters, size)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
    torch.save({"weights": net.state_dict(), "optimizer": optimizer.state_dict()}, f"{path}/rank-{rank}.pt")


def _summed_over_parts(net: Net, xs: Any, ys: Any, window: int) -> list[Tensor]:
    total: list[Tensor] = []
    for number, (x, y) in enumerate(zip(xs, ys, strict=True)):
        kept = [buffer.clone() for buffer in net.buffers()]
        loss = cross_entropy(net(x), y) / len(xs) / window
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        total = [a + b for a, b in zip(total, gradients, strict=True)] if number else list(gradients)
        if number:
            for buffer, old in zip(net.buffers(), kept, strict=True):
                buffer.copy_(old)
    return total


def _broadcast_buffers(net: Net) -> None:
    for buffer in net.buffers():
        dist.broadcast(buffer, 0)


def _average(parameters: list[nn.Parameter], size: int) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad /= size
        dist.all_reduce(parameter.grad)
