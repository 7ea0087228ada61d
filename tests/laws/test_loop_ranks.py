"""Loops on several ranks whose script exchanges gradients or keeps objects in ways of its own."""

import logging
import os
import signal
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from laws.loops import SEED
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Loop
from midstride.engine.errors import NotExact, UnsupportedState
from midstride.engine.state.differences import differences
from midstride.engine.testing import run_ranks


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Dropout(0.3), nn.Linear(20, 3))


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


class Scaled(nn.Module):
    """Holds a replica, a group of ranks and a count."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.calls, self.ranks = net, 0, dist.group.WORLD

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x) * (1 + 0.01 * self.calls)


#: what a world trains with: the model, its optimizer, the objects to keep, and a function called after each step
Parts = tuple[nn.Module, Any, dict[str, Any], Callable[[int], None]]


def nothing(index: int) -> None:
    pass


def compressed() -> Parts:
    """A replica in a module, PowerSGD with error feedback, and an average on rank 0."""
    replica = DistributedDataParallel(net())
    state: Any = PowerSGDState(None, start_powerSGD_iter=3, min_compression_rate=1)
    replica.register_comm_hook(state, powerSGD_hook)
    model = Scaled(replica)
    average = deepcopy(replica.module) if dist.get_rank() == 0 else None

    def update(index: int) -> None:
        if average is not None:
            for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                mean.data.lerp_(weight.data, 0.1)

    kept = {} if average is None else {"average": average}
    return model, optimizer_of(model), {"model": model, **kept}, update


def fed_back() -> Parts:
    """A hook of the script's that feeds errors back; the script keeps the module inside of the replica."""
    module, errors = net(), dict[int, Tensor]()
    replica = DistributedDataParallel(module)

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        gradient = bucket.buffer()
        error = errors.get(bucket.index())
        gradient = gradient + error if error is not None and error.shape == gradient.shape else gradient
        sent = gradient.sign() * gradient.abs().mean()
        errors[bucket.index()] = gradient - sent
        return dist.all_reduce(sent / dist.get_world_size(), async_op=True).get_future().then(lambda f: f.value()[0])

    replica.register_comm_hook(None, hook)
    return replica, optimizer_of(module), {"model": module}, nothing


def apart() -> Parts:
    """Local SGD: from step 5 on the ranks have different weights, which every third step averages."""
    replica = DistributedDataParallel(net())
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    replica.register_comm_hook(PostLocalSGDState(None, alone, 5), post_localSGD_hook)
    averager: Any = PeriodicModelAverager(period=3, warmup_steps=5)
    kept = {"model": replica, "averager": averager}
    return replica, optimizer_of(replica), kept, lambda _: averager.average_parameters(replica.parameters())


def windows() -> Parts:
    """Sharded weights whose gradients are exchanged after every second batch only."""
    model: Any = fully_shard(net())
    model.set_requires_gradient_sync(False)
    return model, optimizer_of(model), {"model": model}, lambda index: model.set_requires_gradient_sync(index % 2 == 0)


def in_groups() -> Parts:
    """Two replicas of one rank and of two."""
    groups = [dist.new_group(ranks) for ranks in ([0], [1, 2])]
    replica = DistributedDataParallel(net(), process_group=groups[dist.get_rank() > 0])
    return replica, optimizer_of(replica), {"model": replica}, nothing


WORLDS: dict[str, Callable[[], Parts]] = {
    "compressed": compressed,
    "fed back": fed_back,
    "apart": apart,
    "in groups": in_groups,
    "windows": windows,
}


def die(folder: Path, planned: list[tuple[int, int]], step: int) -> None:
    """Kill this process at the planned ranks and steps, each once over all attempts."""
    for number, death in enumerate(planned):
        mark = folder / f"death-{number}"
        if death == (dist.get_rank(), step) and not mark.exists():
            mark.touch()
            time.sleep(0.2)  # the snapshot of the step before is committed
            os.kill(os.getpid(), signal.SIGKILL)


def train(world: str, folder: Path, planned: list[tuple[int, int]]) -> None:
    dist.init_process_group("gloo")
    logging.getLogger("midstride").addHandler(handler := logging.FileHandler(folder / f"warned-{dist.get_rank()}"))
    handler.setLevel(logging.WARNING)
    loop = Loop(folder / "run", seed=SEED, snapshots={"every_steps": 1}, enable_progress_bar=False)
    model, optimizer, kept, after = WORLDS[world]()
    loop.keep(optimizer=optimizer, **kept)
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    batches = loop.loader(DataLoader(TensorDataset(x, x[:, :3].argmax(1)), 4, shuffle=True))
    for epoch in loop.epochs(2):
        for index, (inputs, targets) in enumerate(batches):
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            if world != "windows" or index % 2 == 1:
                optimizer.step()
            after(index)
            if world != "windows" or index % 2 == 1:
                optimizer.zero_grad()
            die(folder, planned, epoch * len(batches) + index)
            loop.log("loss", loss)
    ended = {name: one.detach().clone() for name, one in model.state_dict().items()}
    torch.save({name: one.full_tensor() if world == "windows" else one for name, one in ended.items()}, _ended(folder))
    loop.close()


def _ended(folder: Path) -> Path:
    return folder / f"ended-{dist.get_rank()}.pt"


def train_parallel(folder: Path) -> None:
    dist.init_process_group("gloo")
    loop = Loop(folder / "run", seed=SEED, snapshots={"every_steps": 1}, enable_progress_bar=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(net(), mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})
    loop.keep(model=model, optimizer=optimizer_of(model))
    with pytest.raises(UnsupportedState, match=r"tensor of \(3, 20\) is placed as .*tensor parallelism"):
        next(iter(loop.steps(1)))


def test_tensor_parallelism_is_refused_before_the_first_step(tmp_path: Path) -> None:
    assert run_ranks(train_parallel, tmp_path, processes=2) == [0, 0]


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_with_ways_of_their_own_end_as_undisturbed(world: str, tmp_path: Path) -> None:
    whole, killed, ranks = tmp_path / "whole", tmp_path / "killed", 3
    for folder, planned in ((whole, []), (killed, [(0, 5), (2, 11)])):
        folder.mkdir()
        for _ in planned:
            assert -9 in run_ranks(train, world, folder, planned, processes=ranks)
        assert run_ranks(train, world, folder, planned, processes=ranks) == [0] * ranks
        assert len([*folder.glob("death-*")]) == len(planned)
    for rank in range(ranks):
        ended = [torch.load(folder / f"ended-{rank}.pt") for folder in (whole, killed)]
        assert differences(*ended) == []
    assert (killed / "run/metrics.csv").read_text() == (whole / "run/metrics.csv").read_text()
    assert {path.read_text() for path in tmp_path.glob("*/warned-*")} == {""}


def wrap_anew(folder: Path) -> None:
    """Wrap the module again after the first epoch."""
    dist.init_process_group("gloo")
    logging.getLogger("midstride").addHandler(logging.FileHandler(folder / f"warned-{dist.get_rank()}"))
    loop = Loop(folder / "run", seed=SEED, snapshots={"every_steps": 1}, enable_progress_bar=False)
    module = nn.Linear(2, 1)
    loop.keep(module=module)
    replica, batches = DistributedDataParallel(module), loop.loader(DataLoader(torch.ones(8, 2), 2))
    for epoch in loop.epochs(2):
        replica = DistributedDataParallel(module) if epoch == 1 else replica
        for batch in batches:
            replica(batch).sum().backward()
    loop.close()


def test_a_replica_made_in_training_is_named(tmp_path: Path) -> None:
    assert run_ranks(wrap_anew, tmp_path, processes=2) == [0, 0]
    assert "the DistributedDataParallel around module" in (tmp_path / "warned-0").read_text()


def hook_late(folder: Path) -> None:
    """Register torch's hook after the first epoch: an attempt that resumes in the third has none."""
    dist.init_process_group("gloo")
    loop = Loop(folder / "run", seed=SEED, snapshots={"every_steps": 1}, enable_progress_bar=False)
    replica = DistributedDataParallel(nn.Linear(2, 1))
    loop.keep(module=replica)
    batches = loop.loader(DataLoader(torch.ones(8, 2), 2))
    for epoch in loop.epochs(3):
        if epoch == 1:
            replica.register_comm_hook(None, fp16_compress_hook)
        for batch in batches:
            replica(batch).sum().backward()
            if epoch == 2:
                raise KeyboardInterrupt
    loop.close()


def resume_with_hook(folder: Path) -> None:
    with pytest.raises(NotExact, match="replica of module had the communication hook fp16_compress_hook"):
        hook_late(folder)


def test_a_hook_registered_in_training_is_named(tmp_path: Path) -> None:
    assert 0 not in run_ranks(hook_late, tmp_path, processes=2)
    assert run_ranks(resume_with_hook, tmp_path, processes=2) == [0, 0]
