"""XLA: a replica per TPU core or other torch_xla device, with torch_xla's collectives."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import Tensor, nn
from torch.optim import Optimizer

from midstride.engine.errors import StrategyUnavailable, UserError, WorldError
from midstride.engine.modules.module import TrainingModule
from midstride.engine.modules.torch_internals import parameters_of
from midstride.engine.strategies.layer_faults import sparse_layers
from midstride.engine.strategies.mixins import LazyDevice, ReplicatesParameters
from midstride.engine.strategies.step import StepScope
from midstride.engine.strategies.torch_collective import TorchCollective, average_gradients
from midstride.engine.strategies.torch_internals import initialize_xla

__all__ = ["Xla"]

_HOST = torch.device("cpu")


class Xla(ReplicatesParameters, LazyDevice):
    """Replicates the module on each rank's XLA device. Gloo exchanges all but the gradients.

    An XLA device records operations and executes them as one graph, and the extent of a graph decides how results
    are rounded. So a graph ends at every boundary, whether a snapshot is taken there or not, and a resumed process
    executes the same graphs.

    Args:
        core: index of the core that a single process trains on; by default torch_xla's first.
    """

    name = "xla"

    def __init__(self, *, core: int | None = None) -> None:
        super().__init__(TorchCollective())
        self.generator = _Generator()
        self._core = core

    def module_errors(self, module: TrainingModule) -> list[str]:
        """Return messages on layers with sparse gradients, which XLA devices do not support."""
        return super().module_errors(module) + [
            f"the module's {name} has sparse gradients, which XLA devices do not have: build it with sparse=False, or "
            "use strategy single"
            for name in sparse_layers(module)
        ]

    def init_process_group(self) -> None:
        """Connect to the other ranks, and select this rank's device.

        Raises:
            WorldError: torch_xla does not give each rank its own device.
            StrategyUnavailable: there is no core of that index.
        """
        if self.world.size > 1 and not dist.is_initialized():
            initialize_xla(self.world.local_rank, self.world.local_size)
        # Before the ranks connect: every rank detects this by itself, and none waits for a rank that has left.
        if (found := xr.world_size()) != self.world.size:
            raise WorldError(
                f"rank {self.world.rank} belongs to a world of {self.world.size}, and torch_xla knows of {found}: "
                f"start one process for each core of {xr.device_type()} (PJRT_DEVICE)."
            )
        super().init_process_group()
        try:
            self.devices = [torch_xla.device(self._core)]
        except IndexError as error:
            raise StrategyUnavailable(
                f"there is no core {self._core}: torch_xla finds {len(torch_xla.devices())} here "
                f"({xr.device_type()}), counted from 0"
            ) from error

    def setup_module(
        self, module: TrainingModule, scope: StepScope, first_batch: Callable[[], Any] | None = None
    ) -> None:
        """Move `module` to this rank's device and broadcast rank 0's weights."""
        _move(module, self.device)
        if self.world.size == 1:
            return
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                host = tensor.cpu()
                dist.broadcast(host, 0)
                tensor.copy_(host)

    def setup_optimizers(self, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
        """Check that optimizers hold the parameters on the device.

        Raises:
            UserError: one was made before the module was moved there.
        """
        for optimizer in optimizers:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if any(parameter.device.type != self.device.type for parameter in parameters):
                raise UserError(
                    f"the {type(optimizer).__name__} holds weights as they were before strategy {self.name} brought "
                    "them to its device: create it in configure_optimizers, with self.parameters()."
                )

    def mark_step(self) -> None:
        """End the current graph and execute it."""
        torch_xla.sync()

    def reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Average gradients in one flat buffer of a fixed layout in the graph, without a wait."""
        if self.world.size > 1:
            average_gradients(parameters, _HOST, self.world.size, add_up=_add_up)


class _Generator:
    """Device's random number generator. Its state is one integer that each graph advances."""

    def get_state(self) -> int:
        return int(xm.get_rng_state())

    def set_state(self, state: int) -> None:
        xm.set_rng_state(state)


def _add_up(flat: Tensor) -> None:
    xm.all_reduce(xm.REDUCE_SUM, [flat])


def _move(module: nn.Module, device: torch.device) -> None:
    """Move `module` to `device`, and tie again the parameters that were tied.

    Between the CPU and XLA, `Module.to` replaces parameters, by a new one for each module that has them.
    """
    owners = [
        (submodule, name, id(parameter))
        for submodule in module.modules()
        for name, parameter in parameters_of(submodule).items()
        if parameter is not None
    ]
    module.to(device)
    moved: dict[int, nn.Parameter | None] = {}
    for submodule, name, original in owners:
        parameters_of(submodule)[name] = moved.setdefault(original, parameters_of(submodule)[name])
