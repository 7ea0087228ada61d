"""DDP in lanes: a replica per process; sums independent of the number of processes."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from midstride.engine.config.options import TrainerOptions
from midstride.engine.lanes import Lanes
from midstride.engine.modules.module import TrainingModule
from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.collective import SingleProcess
from midstride.engine.strategies.layer_faults import sparse_layers
from midstride.engine.strategies.mixins import RunsLanes, WatchesFrozen
from midstride.engine.strategies.ordered_reducer import OrderedReducer
from midstride.engine.strategies.step import TrainingStep
from midstride.engine.strategies.torch_collective import TorchCollective, broadcast
from midstride.engine.world import World

__all__ = ["OrderedDdp"]


class OrderedDdp(RunsLanes, WatchesFrozen, Strategy):
    """Replicates the module, and sums gradients of lanes in one order on any number of ranks.

    Args:
        lanes: number of equal parts of every batch; a power of two, and a multiple of the number of ranks.
    """

    name = "ddp"

    def __init__(self, *, lanes: int) -> None:
        super().__init__()
        self._count = lanes
        self._reducer: OrderedReducer | None = None

    def attach(self, world: World, devices: Sequence[torch.device]) -> None:
        """Set world and devices; a single rank needs no process group."""
        super().attach(world, devices)
        self.collective = TorchCollective() if world.size > 1 else SingleProcess()

    @property
    def lanes(self) -> Lanes:
        """All lanes of a batch, and which of them this rank runs."""
        return Lanes(self._count, self.world.rank, self.world.size)

    @property
    def identity(self) -> str:
        """The name and the number of lanes; the number of ranks does not change the bits."""
        return f"{self.name}(lanes={self._count})"

    @property
    def data_world(self) -> World:
        """A world with one rank per lane, in which this process is the rank of its first lane."""
        return World(rank=self.lanes.own.start, size=self._count, local_size=self._count)

    def module_errors(self, module: TrainingModule) -> list[str]:
        """Return messages on parts of `module` that lanes do not support."""
        errors = super().module_errors(module)
        if not module.automatic_optimization:
            errors.append(
                "lanes with automatic_optimization=False: use automatic optimization, or leave lanes out. The engine "
                "calls the backward pass of each lane itself"
            )
        for path, submodule in module.named_modules():
            if isinstance(submodule, nn.SyncBatchNorm):
                errors.append(
                    f"lanes with {path}, a SyncBatchNorm: use BatchNorm, which normalises over a lane. SyncBatchNorm "
                    "normalises over the ranks, whose number can change"
                )
        return errors + [
            f"lanes with {path}, whose gradients are sparse: lanes add up dense ones: say sparse=False"
            for path in sparse_layers(module)
        ]

    def fit_errors(self, optimizers: Sequence[Optimizer], options: TrainerOptions, batch_size: int | None) -> list[str]:
        """Return messages on settings of a fit that lanes do not support."""
        errors = []
        if len(optimizers) > 1:
            errors.append(f"lanes with {len(optimizers)} optimizers: a step has one: use one with parameter groups")
        if options.on_nan == "skip":
            errors.append("lanes with on_nan='skip': a batch is left out by all lanes or by none: say on_nan='fail'")
        return errors

    def wrap(self, step: TrainingStep, *, one_backward: bool) -> nn.Module:
        """Return `step` itself: hooks on the parameters collect gradients as they become ready."""
        if self.world.size > 1:
            broadcast(step)
        self.watch_frozen(step.module)
        self._reducer = OrderedReducer(step.module, self.lanes)
        return step

    def batch(self) -> AbstractContextManager[None]:
        """Return the context of a batch's lanes. At its end gradients and buffers are their means."""
        assert self._reducer is not None  # set by wrap
        return self._reducer.batch()

    def lane(self, lane: int) -> AbstractContextManager[None]:
        """Return the context of the forward and backward pass of `lane`."""
        assert self._reducer is not None
        return self._reducer.lane(lane)

    def restore_buffers(self) -> None:
        """Restore the module's buffers to their values at the start of the batch."""
        assert self._reducer is not None
        self._reducer.restore_buffers()

    def reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Do nothing: gradients were averaged at the end of the batch."""

    def is_replicated(self, path: str) -> bool:
        """Return True if the part of `path` is equal on all ranks, unlike metrics and logged values."""
        return path.partition("/")[0] in ("module", "optimizers", "gradients", "buffers")
