"""One full replica per process, and one order of sums whatever their number: DDP in lanes."""

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
    """Replicate the module on every rank, and add up the gradients of lanes in one order, on any number of ranks.

    Args:
        lanes: equal parts of every batch; a power of two, which the number of ranks divides.
    """

    name = "ddp"

    def __init__(self, *, lanes: int) -> None:
        super().__init__()
        self._count = lanes
        self._reducer: OrderedReducer | None = None

    def attach(self, world: World, devices: Sequence[torch.device]) -> None:
        """Belong to `world`; a rank alone has no other to meet."""
        super().attach(world, devices)
        self.collective = TorchCollective() if world.size > 1 else SingleProcess()

    @property
    def lanes(self) -> Lanes:
        """The lanes, and those of this rank."""
        return Lanes(self._count, self.world.rank, self.world.size)

    @property
    def identity(self) -> str:
        """The name and the lanes: the number of ranks decides nothing."""
        return f"{self.name}(lanes={self._count})"

    @property
    def data_world(self) -> World:
        """As many ranks as there are lanes; this one stands at its first lane."""
        return World(rank=self.lanes.own.start, size=self._count, local_size=self._count)

    def module_errors(self, module: TrainingModule) -> list[str]:
        """Return what of `module` would not be a function of the lane."""
        errors = super().module_errors(module)
        if not module.automatic_optimization:
            errors.append(
                "lanes with automatic_optimization=False: the engine runs a step lane by lane, and has to call the "
                "backward passes itself: use automatic optimization, or leave lanes out"
            )
        for path, submodule in module.named_modules():
            if isinstance(submodule, nn.SyncBatchNorm):
                errors.append(
                    f"lanes with {path}, a SyncBatchNorm: it normalises over the ranks, whose number lanes leave open: "
                    "use BatchNorm, whose statistics are a lane's"
                )
        return errors + [
            f"lanes with {path}, whose gradients are sparse: lanes add up dense ones: say sparse=False"
            for path in sparse_layers(module)
        ]

    def fit_errors(self, optimizers: Sequence[Optimizer], options: TrainerOptions, batch_size: int | None) -> list[str]:
        """Return what of a fit is not run lane by lane."""
        errors = []
        if len(optimizers) > 1:
            errors.append(f"lanes with {len(optimizers)} optimizers: a step has one: use one with parameter groups")
        if options.on_nan == "skip":
            errors.append("lanes with on_nan='skip': a batch is left out by all lanes or by none: say on_nan='fail'")
        return errors

    def wrap(self, step: TrainingStep, *, one_backward: bool) -> nn.Module:
        """Return `step` as it is: gradients are taken where they become ready."""
        if self.world.size > 1:
            broadcast(step)
        self.watch_frozen(step.module)
        self._reducer = OrderedReducer(step.module, self.lanes)
        return step

    def batch(self) -> AbstractContextManager[None]:
        """Return the context of all lanes of a batch; after it, gradients and buffers are the means over all lanes."""
        assert self._reducer is not None  # made by wrap
        return self._reducer.batch()

    def lane(self, lane: int) -> AbstractContextManager[None]:
        """Return the context of the forward and backward pass of `lane`."""
        assert self._reducer is not None
        return self._reducer.lane(lane)

    def restore_buffers(self) -> None:
        """Put the module's buffers back to where every lane begins."""
        assert self._reducer is not None
        self._reducer.restore_buffers()

    def reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Do nothing: every batch has ended with the mean."""

    def is_replicated(self, path: str) -> bool:
        """Return whether `path` is of what a step ends with; what is logged and seen is a lane's."""
        return path.partition("/")[0] in ("module", "optimizers", "gradients", "buffers")
