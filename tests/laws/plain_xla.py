"""The oracle of law 4 for XLA, as in `plain`: a script of torch_xla's own."""

import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
from laws.plain import SEED, Net, epochs, rank_seed, seed_everything
from laws.plain_sharded import own
from torch import nn
from torch.nn.functional import cross_entropy
from torch_xla._internal import pjrt


def plain_xla(path: str, samples: int, window: int, clip: float | None) -> None:
    """Train with one buffer of all gradients a step; a graph ends with each batch."""
    rank, size = _met()
    device = torch_xla.device()
    seed_everything(SEED)
    net = Net().to(device)
    parameters = list(net.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    seed_everything(rank_seed(SEED, rank))
    xm.set_rng_state(rank_seed(SEED, rank))
    for loader in epochs(samples, rank, size):
        for index, (x, y, _) in enumerate(loader):
            loss = cross_entropy(net(x.to(device)), y.to(device))
            assert loss.isfinite()
            (loss / window).backward()
            if (index + 1) % window == 0 or index + 1 == len(loader):
                if size > 1:
                    _average(parameters, size)
                if clip is not None:
                    nn.utils.clip_grad_norm_(parameters, clip)
                optimizer.step()
                optimizer.zero_grad()
            torch_xla.sync()
        scheduler.step()
    torch.save(own({"weights": net.state_dict(), "optimizer": optimizer.state_dict()}), f"{path}/rank-{rank}.pt")


def _met() -> tuple[int, int]:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if size > 1:
        pjrt.initialize_multiprocess(rank, size)
    return rank, size


def _average(parameters: list[nn.Parameter], size: int) -> None:
    flat = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
    xm.all_reduce(xm.REDUCE_SUM, [flat])
    flat /= size
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter).clone()
