"""Processes that split each batch over several devices: a repeatable `nn.DataParallel`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from midstride.engine.metrics.torchmetrics_internals import keeps_states
from midstride.engine.metrics.torchmetrics_state import is_metric
from midstride.engine.modules.module import TrainingModule, set_device
from midstride.engine.modules.torch_internals import buffers_of, children_of, parameters_of
from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.batch_split import cut, join
from midstride.engine.strategies.ddp import Ddp
from midstride.engine.strategies.flat_tensors import copy_together
from midstride.engine.strategies.mixins import MergesOutputs
from midstride.engine.strategies.single import Single
from midstride.engine.strategies.step import StepName, StepScope, loss_in
from midstride.engine.strategies.torch_internals import replica_of
from midstride.engine.trees import move

__all__ = ["Ddp2", "Dp"]


class SplitsBatches(MergesOutputs, Strategy):
    """Splits each batch of a process over several devices. Put the mixin first among the bases."""

    @property
    def identity(self) -> str:
        """Name and number of chunks of a batch, each with its own mean and batch statistics."""
        inner = super().identity.removesuffix(")")
        return f"{inner}{', ' if '(' in inner else '('}devices={len(self.devices)})"

    def module_errors(self, module: TrainingModule) -> list[str]:
        """Return messages, also on manual optimization: each chunk would step the optimizers."""
        errors = super().module_errors(module)
        if module.automatic_optimization:
            return errors
        return [
            *errors,
            f"{type(module).__name__} has automatic_optimization = False: under {self.name} its training_step runs for "
            "each part of a batch, and each would step the optimizers. Use ddp, or automatic optimization.",
        ]

    def step_call(self, scope: StepScope, module: TrainingModule, name: StepName) -> Callable[..., Any]:
        """Return a function that runs the user's step on each chunk of a batch and joins outputs."""

        def on_replicas(batch: Any, *arguments: Any) -> Any:
            def run(replica: TrainingModule, chunk: Any) -> Any:
                return scope.call(replica, name, chunk, *arguments)

            return run_on_replicas(module, batch, self.devices, run, scope.micro_batches)

        return on_replicas

    def merge_outputs(self, outputs: Any) -> Any:
        """Replace a loss with one element per chunk by its mean; return other outputs as they are."""
        loss = loss_in(outputs)
        if not isinstance(loss, Tensor) or loss.ndim != 1 or len(loss) > len(self.devices):
            return outputs
        return {**outputs, "loss": loss.mean()} if isinstance(outputs, dict) else loss.mean()


class Dp(SplitsBatches, Single):
    """Splits each batch over this process's devices; on the CPU, over virtual devices.

    The module is replicated for each chunk, gradients are added in the order of the chunks, and the buffers of the
    first replica are kept. `<step>_end` gets the joined outputs, so a loss computed there is over the whole batch.
    """

    name = "dp"


def run_on_replicas(
    module: TrainingModule,
    batch: Any,
    devices: Sequence[torch.device],
    step: Callable[[TrainingModule, Any], Any],
    micro_batches: Callable[[], AbstractContextManager[None]],
) -> Any:
    """Return the joined outputs of `step(replica, chunk)`, one chunk of `batch` per device.

    Replicas share the weights and the metrics of `module`. The first replica has its buffers; changes to the buffers
    of other replicas, and to plain attributes of any replica, are dropped.

    Args:
        module: the module to replicate.
        batch: is cut along its samples.
        devices: one for each chunk; a device can be listed several times.
        step: runs a chunk.
        micro_batches: the context in which all chunks run.
    """
    chunks = cut(batch, len(devices))
    if len(chunks) == 1:
        # join as well, so that the outputs have the same shape for any number of chunks
        return join([step(module, batch)])
    made: list[dict[int, Any]] = [{} for _ in chunks]
    used = devices[: len(chunks)]
    for device, tensors, replicas in zip(used, _tensors(module, used), made, strict=True):
        _replica(module, tensors, device, replicas)
    outputs = []
    with micro_batches():
        for chunk, device, replicas in zip(chunks, used, made, strict=True):
            with _on(device), _metrics_at_home(module, device):
                outputs.append(step(replicas[id(module)], move(chunk, device)))
    _keep_buffers(module, made[0])
    return join(outputs)


def _tensors(module: nn.Module, devices: Sequence[torch.device]) -> list[dict[int, Tensor]]:
    """Return copies of parameters and buffers per device, by the id of the original."""
    parameters, buffers = list(module.parameters()), list(module.buffers())
    broadcast: Callable[..., tuple[Tensor, ...]] = _Broadcast.apply
    copies = iter(broadcast(list(devices), *parameters) if parameters else ())
    tensors = [{id(p): next(copies) for p in parameters} for _ in devices]
    for number, device in enumerate(devices):
        own = copy_together(buffers, device) if number else buffers
        tensors[number].update(zip(map(id, buffers), own, strict=True))
    return tensors


class _Broadcast(torch.autograd.Function):
    """Copies parameters for each replica. Backward adds their gradients in order of replicas."""

    @staticmethod
    def forward(ctx: Any, devices: list[torch.device], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.devices, ctx.home = devices, devices[0]
        copies: list[Tensor] = []
        for device in devices:
            # Replicas on the device of the module share its weights.
            copies += [p.view_as(p) for p in parameters] if device == ctx.home else copy_together(parameters, device)
        frozen = [not needed for needed in ctx.needs_input_grad[1:]] * len(devices)
        ctx.mark_non_differentiable(*(copy for copy, is_frozen in zip(copies, frozen, strict=True) if is_frozen))
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        count = len(gradients) // len(ctx.devices)
        sums: list[Tensor | None] = [None] * count
        for replica, device in enumerate(ctx.devices):
            mine = zip(ctx.needs_input_grad[1:], gradients[replica * count : (replica + 1) * count], strict=True)
            there = {i: gradient for i, (needed, gradient) in enumerate(mine) if needed and gradient is not None}
            home = there.values() if device == ctx.home else copy_together(list(there.values()), ctx.home)
            for number, gradient in zip(there, home, strict=True):
                total = sums[number]
                sums[number] = gradient if total is None else total + gradient
        return (None, *sums)


def _replica(module: Any, tensors: dict[int, Tensor], device: torch.device, made: dict[int, Any]) -> Any:
    """Return a shallow copy of `module` with `tensors`. `made` maps original ids to copies."""
    if id(module) in made or is_metric(module):
        return made.get(id(module), module)
    replica = made[id(module)] = replica_of(module)
    for name, parameter in parameters_of(module).items():
        setattr(replica, name, None if parameter is None else tensors[id(parameter)])
    for name, buffer in buffers_of(module).items():
        buffers_of(replica)[name] = None if buffer is None else tensors[id(buffer)]
    for name, child in children_of(module).items():
        children_of(replica)[name] = None if child is None else _replica(child, tensors, device, made)
    if isinstance(module, TrainingModule):
        set_device(replica, device)
    return replica


def _keep_buffers(module: nn.Module, made: dict[int, Any]) -> None:
    """Set the buffers of `module` to its replica's, which can be new tensors."""
    for original in module.modules():
        if id(original) in made:
            buffers_of(original).update(buffers_of(made[id(original)]))


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def _metrics_at_home(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Move the arguments of `update` calls of the shared metrics to the device of the metric."""
    metrics: list[Any] = [m for m in module.modules() if is_metric(m) and keeps_states(m)]
    away = [metric for metric in metrics if metric.device != device]
    updates = [metric.update for metric in away]
    for metric, update in zip(away, updates, strict=True):
        metric.update = _moving_arguments(update, metric.device)
    try:
        yield
    finally:
        for metric, update in zip(away, updates, strict=True):
            metric.update = update


def _moving_arguments(update: Callable[..., None], home: torch.device) -> Callable[..., None]:
    def update_at_home(*args: Any, **kwargs: Any) -> None:
        moved = [arg.to(home) if isinstance(arg, Tensor) else arg for arg in args]
        named = {name: arg.to(home) if isinstance(arg, Tensor) else arg for name, arg in kwargs.items()}
        update(*moved, **named)

    return update_at_home


class Ddp2(SplitsBatches, Ddp):
    """Starts one process a node. Its whole batch reaches `training_step_end`.

    Gradients are averaged over nodes.
    """

    name = "ddp2"
