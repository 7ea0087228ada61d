"""The oracle of law 4 for pipelines: all layers on one device, every batch in equal parts, one after the other."""

import os

import torch
import torch.distributed as dist
from laws.plain import SEED, epochs, seed_everything
from torch import nn
from torch.nn.functional import cross_entropy

BATCH = 8


class RunningScale(nn.Module):
    """Divides by a running mean of what it has seen, which is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().abs().mean()
        return x / self.mean


def layers() -> nn.Sequential:
    """Return layers with batch norm, one of which stands there twice, in other stages.

    They draw no random numbers: each stage draws those of its own process.
    """
    act = nn.ReLU()
    return nn.Sequential(
        *(nn.Linear(6, 40), nn.Unflatten(1, (20, 2)), nn.BatchNorm1d(20), nn.Flatten(), act, RunningScale()),
        *(nn.Linear(40, 20), act, nn.Linear(20, 3)),
    )


def plain_pipeline(path: str, samples: int, parts: int, window: int, clip: float | None) -> None:
    """Train, and save the weights to `path`; with two ranks, each is a pipeline of its own."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size > 1:
        dist.init_process_group("gloo")
    seed_everything(SEED)
    net = layers()
    parameters = list(net.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for loader in epochs(samples, rank, size, BATCH):
        for index, (x, y, _) in enumerate(loader):
            equal = max(n for n in range(1, parts + 1) if len(x) % n == 0)
            for part, target in zip(x.chunk(equal), y.chunk(equal), strict=True):
                (cross_entropy(net(part), target) / window / equal).backward()
            if (index + 1) % window == 0 or index + 1 == len(loader):
                _average(parameters, size)
                if clip is not None:
                    nn.utils.clip_grad_norm_(parameters, clip)
                optimizer.step()
                optimizer.zero_grad()
    if rank == 0:
        torch.save(net.state_dict(), f"{path}/weights.pt")


def _average(parameters: list[nn.Parameter], size: int) -> None:
    for parameter in parameters if size > 1 else ():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= size
