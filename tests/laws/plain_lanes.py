"""The oracle of lanes: one process of plain PyTorch that runs every lane of a batch and adds up as a tree.

The random numbers of a lane are seeded by where it stands: the hash of the run's seed, 0 for training, the epoch, the
batch and the lane. Buffers of floating point become the mean of what lanes make of the same ones.
"""

import warnings
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from laws.lives import Samples
from laws.plain import rank_seed as mix
from laws.plain import seed_everything
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

SEED, EPOCHS, BATCH, LANES, SAMPLES = 7, 2, 4, 4, 90


class Dropped(nn.Module):
    """Dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(40, 3)
        self.body = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x))


class Convolved(nn.Module):
    """Weights whose order in memory is not that of their shape; a mask that no sum of lanes could hold."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.body.to(memory_format=torch.channels_last)
        self.last = nn.Linear(48, 3)
        self.register_buffer("mask", torch.tensor([0.0, torch.finfo(torch.float32).min, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x.view(-1, 1, 2, 3))) + self.mask.clamp(min=-1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(2, 12, num_layers=2, batch_first=True)
        self.last = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x.view(-1, 3, 2))[0][:, -1])


class Choosing(nn.Module):
    """A layer that some lanes use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.some, self.none = nn.Linear(6, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return y + self.some(y) if x.sum() > 2 else y


class Derived(nn.Module):
    """Weights that each forward pass makes of others, and leaves in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of the form that does so
            self.body = nn.utils.weight_norm(nn.Linear(6, 12))
        self.last = nn.utils.spectral_norm(nn.Linear(12, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x).tanh())


_KINDS: tuple[type[nn.Module], ...] = (Dropped, Convolved, Recurrent, Choosing, Derived)
NETS: dict[str, type[nn.Module]] = {kind.__name__: kind for kind in _KINDS}


def tree_sum(terms: Sequence[Tensor]) -> Tensor:
    while len(terms) > 1:
        terms = [terms[i] + terms[i + 1] for i in range(0, len(terms), 2)]
    return terms[0]


def plain_lanes(kind: type[nn.Module], window: int = 1, clip: float | None = None, bf16: bool = False) -> Any:
    """Train; return weights and optimizer state."""
    seed_everything(SEED)
    net = kind()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = Samples(SAMPLES, noise=0.0)
    samplers: list[Any] = [DistributedSampler(data, LANES, lane, seed=SEED) for lane in range(LANES)]
    loaders = [DataLoader(data, BATCH, sampler=sampler, generator=torch.Generator()) for sampler in samplers]
    for epoch in range(EPOCHS):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for index, lanes in enumerate(zip(*loaders, strict=True)):
            seeds = [reduce(mix, (0, epoch, index, lane), SEED) for lane in range(LANES)]
            _add_means(net, lanes, seeds, window, bf16)
            if (index + 1) % window == 0 or index + 1 == len(loaders[0]):
                if clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
    return {"weights": net.state_dict(), "optimizer": optimizer.state_dict()}


def _add_means(net: nn.Module, lanes: Any, seeds: Sequence[int], window: int, bf16: bool) -> None:
    """Add the mean of the lanes' gradients to those of `net`; let its buffers be the mean of theirs."""
    before, start = [p.grad for p in net.parameters()], [b.clone() for b in net.buffers()]
    gradients, buffers = [], []
    for seed, (x, y, _) in zip(seeds, lanes, strict=True):
        for buffer, value in zip(net.buffers(), start, strict=True):
            buffer.copy_(value)
        net.zero_grad()
        torch.manual_seed(seed)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = cross_entropy(net(x), y) / window
        loss.backward()
        gradients.append([p.grad for p in net.parameters()])
        buffers.append([b / LANES if b.is_floating_point() else b.clone() for b in net.buffers()])
    for buffer, own in zip(net.buffers(), zip(*buffers, strict=True), strict=True):
        buffer.copy_(tree_sum(own) if buffer.is_floating_point() else own[0])
    for p, grad, own in zip(net.parameters(), before, zip(*gradients, strict=True), strict=True):
        used = any(g is not None for g in own)
        mean = tree_sum([torch.zeros_like(p) if g is None else g for g in own]) / LANES if used else None
        p.grad = mean if grad is None else grad if mean is None else grad + mean
