"""The oracle of law 4 for sharded training: a hand-written script around torch's `fully_shard`."""

import os
from typing import Any

import torch
import torch.distributed as dist
from laws.plain import SEED, Net, epochs, rank_seed, seed_everything
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy


class DeepNet(Net):
    """The same net, with a list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(self.drop(torch.relu(self.norm(self.first(x)))))
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.last(torch.relu(hidden))


def plain_sharded(
    path: str, samples: int, window: int, clip: float | None, frees: bool, replicas: int = 1, bf16: bool = False
) -> None:
    """Train and save this rank's rows of weights and optimizer state to `path`; called in each rank."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    seed_everything(SEED)
    net = DeepNet()
    seed_everything(rank_seed(SEED, rank))
    shape, names = ((size,), ("shard",)) if replicas == 1 else ((replicas, size // replicas), ("replicate", "shard"))
    cut: dict[str, Any] = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names)}
    if bf16:
        cut["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    if bf16:  # as FSDP1 did for batch norm, which has no form in which only the weights have 16 bits
        fully_shard(net.norm, reshard_after_forward=frees, mesh=cut["mesh"])
    for block in net.blocks:
        fully_shard(block, reshard_after_forward=frees, **cut)
    fully_shard(net, reshard_after_forward=False, **cut)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for loader in epochs(samples, rank, size):
        for index, (x, y, _) in enumerate(loader):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = cross_entropy(net(x), y) / window
            loss.backward()
            if (index + 1) % window == 0 or index + 1 == len(loader):
                if clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
    state = {"weights": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(own(state), f"{path}/rank-{rank}.pt")


def own(state: Any) -> Any:
    """Return `state` on the host, with this rank's rows of sharded tensors."""
    if isinstance(state, dict):
        return type(state)((name, own(value)) for name, value in state.items())
    if isinstance(state, list):
        return [own(value) for value in state]
    state = state.to_local() if isinstance(state, DTensor) else state
    return state.cpu() if isinstance(state, torch.Tensor) else state
