"""The oracles of law 4 for Horovod, as in `plain`: a script of Horovod's own, and one that sums in a fixed order."""

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from laws.plain import SEED, Net, epochs, rank_seed, seed_everything
from torch import nn
from torch.nn.functional import cross_entropy


def plain_horovod(path: str, samples: int) -> None:
    """Train as Horovod's documentation says. Over two ranks a sum has no order, so every way to sum is one."""
    net, optimizer = _started()
    wrapped: Any = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    _train(path, samples, 1, net, wrapped, wrapped.step)


def plain_flat(path: str, samples: int, window: int, clip: float | None) -> None:
    """Train with one buffer of all gradients a step, and a 1 for each parameter, since each takes part."""
    net, optimizer = _started()
    parameters = list(net.parameters())

    def step() -> None:
        flat = torch.cat([*(p.grad.reshape(-1) for p in parameters if p.grad is not None), torch.ones(len(parameters))])
        hvd.allreduce_(flat, op=hvd.Average)
        *means, _ = flat.split([*(p.numel() for p in parameters), len(parameters)])
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.grad = mean.view_as(parameter)
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()

    _train(path, samples, window, net, optimizer, step)


def _started() -> tuple[Net, torch.optim.Optimizer]:
    hvd.init()
    seed_everything(SEED)
    net = Net()
    seed_everything(rank_seed(SEED, hvd.rank()))
    return net, torch.optim.SGD(net.parameters(), lr=0.1 * hvd.size(), momentum=0.9)


def _train(
    path: str, samples: int, window: int, net: Net, optimizer: torch.optim.Optimizer, step: Callable[[], Any]
) -> None:
    rank, size = hvd.rank(), hvd.size()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for loader in epochs(samples, rank, size):
        for index, (x, y, _) in enumerate(loader):
            (cross_entropy(net(x), y) / window).backward()
            if (index + 1) % window == 0 or index + 1 == len(loader):
                step()
                optimizer.zero_grad()
        scheduler.step()
    torch.save({"weights": net.state_dict(), "optimizer": optimizer.state_dict()}, f"{path}/rank-{rank}.pt")
