"""What adding up in lanes costs, beside DistributedDataParallel on the same micro-batches.

make bench-lanes

A step is forward and backward of every lane of this rank, and the exchange; DDP exchanges in the last backward pass
only. On one rank the other side is a plain accumulation. Rounds are interleaved, every second one backwards; the figure
is the median over the rounds of the ratio of wall time of rank 0, with the quartiles.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from midstride.engine.data.rng.fast_state import seed_generators
from midstride.engine.lanes import Lanes
from midstride.engine.strategies.ordered_ddp import OrderedReducer
from midstride.engine.testing import run_ranks


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(64, 256, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.view(-1, 16, 64))[0][:, -1]


def mlp() -> nn.Module:
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers)


def convolutions() -> nn.Module:
    block = [nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 16, 3, padding=1)]
    return nn.Sequential(nn.Unflatten(1, (16, 8, 8)), *block, nn.ReLU())


#: samples are rows of 1024 numbers
NETS: dict[str, Callable[[], nn.Module]] = {"MLP, 17 MB": mlp, "LSTM, 3.6 MB": Recurrent, "conv, 0.04 MB": convolutions}
#: ranks, lanes
WORLDS = [(2, 2), (2, 8), (1, 8)]


def in_lanes(net: nn.Module, lanes: Lanes, batches: list[Tensor]) -> Callable[[], None]:
    reducer = OrderedReducer(net, lanes)

    def step() -> None:
        with reducer.batch():
            for lane, x in zip(lanes.own, batches, strict=True):
                with reducer.lane(lane):
                    net(x).square().mean().backward()

    return step


def in_ddp(net: nn.Module, lanes: Lanes, batches: list[Tensor]) -> Callable[[], None]:
    model = DistributedDataParallel(net) if lanes.size > 1 else net

    def step() -> None:
        for number, x in enumerate(batches):
            last = number + 1 == len(batches) or not isinstance(model, DistributedDataParallel)
            with nullcontext() if last else model.no_sync():
                (model(x).square().mean() / len(batches)).backward()

    return step


def measure(count: int, rounds: int, steps: int) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size > 1:
        dist.init_process_group("gloo")
    lanes = Lanes(count, rank, size)
    for name, make in NETS.items():
        torch.manual_seed(0)
        batches = [torch.randn(16, 1024) for _ in lanes.own]
        nets = [make(), make()]
        sides = [in_lanes(nets[0], lanes, batches), in_ddp(nets[1], lanes, batches)]
        ratios = []
        for number in range(rounds + 1):
            seconds = [0.0, 0.0]
            for side in (0, 1) if number % 2 else (1, 0):
                if size > 1:
                    dist.barrier()
                began = time.perf_counter()
                for _ in range(steps):
                    nets[side].zero_grad()
                    sides[side]()
                seconds[side] = time.perf_counter() - began
            ratios.append(seconds[0] / seconds[1])
        low, middle, high = statistics.quantiles(ratios[1:], n=4)
        if rank == 0:
            print(f"| {name} | {size} | {count} | {middle:.2f} [{low:.2f}, {high:.2f}] |", flush=True)


def reseeding_us() -> float:
    began = time.thread_time()
    for seed in range(20_000):
        seed_generators(seed)
    return (time.thread_time() - began) / 20_000 * 1e6


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    print("| net | ranks | lanes | step, of DDP's [quartiles] |\n| --- | --- | --- | --- |", flush=True)
    for ranks, lanes in WORLDS:
        run_ranks(measure, lanes, given.rounds, given.steps, processes=ranks, timeout_s=600)
    print(f"\nseeding the generators of a lane: {reseeding_us():.1f} us")
