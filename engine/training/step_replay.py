"""A replay of a step: watches a fit up to one step, and ends it there.

The plan of a replay is in the environment, so that it reaches every rank however it was launched. A fit without a plan
pays nothing: the places where a replay looks in are those of injected faults.
"""

import importlib.util
import json
import math
import pdb
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from midstride.engine.checkpointing.step_trace import StepTrace
from midstride.engine.errors import ReplayEnd, UserError
from midstride.engine.formatting import format_names
from midstride.engine.modules.module import TrainingModule
from midstride.engine.modules.torch_internals import TorchDispatchMode
from midstride.engine.session.replay_plan import RESULT, TRACE, ReplayPlan
from midstride.engine.strategies.mixins import ModelParallel, RunsBackward, RunsLanes
from midstride.engine.strategies.step import loss_in
from midstride.engine.training.context import FitContext
from midstride.engine.training.fit import Fit
from midstride.engine.training.operation_trace import OperationTrace
from midstride.engine.trees import convert, named_leaves, other_length, samples_in
from midstride.engine.user_code import call_user_code

__all__ = ["StepReplay"]

#: steps before the last one that the page shows
_STEPS_BEFORE = 4
#: most samples of a rank whose losses are computed one by one; samples that the page shows
_TOO_MANY, _SHOWN = 1024, 8
#: relative difference of a batch's loss from the mean over its samples that counts as rounding
_ROUNDING = 1e-3
#: namespaces of torch's operations that exchange data with other ranks
_EXCHANGES = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd")


@dataclass
class StepReplay:
    """Follows a plan: it receives the phases of each step, like a plan of faults.

    Args:
        plan: what to do.
        fit_of: returns the running fit.
    """

    plan: ReplayPlan
    fit_of: Callable[[], Fit | None]
    #: the step as JSON values: position, samples, loss, learning rates, norms by layer
    page: dict[str, Any] = field(default_factory=dict)
    #: rows of the metric log, as CSV
    rows: str = ""
    batch: Any = None
    loss: Tensor | None = None
    #: batches of the last step with their numbers; position, weights and buffers before it
    _batches: list[tuple[int, Any]] = field(default_factory=list)
    _position: dict[str, Any] = field(default_factory=dict)
    _before: dict[str, Tensor] = field(default_factory=dict)
    _is_watching: bool = False
    _trace: StepTrace | None = None
    _operations: OperationTrace | None = None

    def at(self, rank: int, step: int, phase: str, *given: Any) -> None:
        """Act at a phase of the step after `step` others; "after_step" comes after its end."""
        fit = self.fit_of()
        if fit is None:
            return
        if self.plan.trace:
            self._note(phase, fit.context, step, *given)
        if phase == "after_step":
            self._after_step(fit, step)
            return
        if phase == "forward" and self.plan.anomaly and not self._is_watching:
            self._is_watching = True
            _watch_values(fit.context.module)
        if self._has_page and step >= self.plan.until - 1 - _STEPS_BEFORE:
            self._note_step(fit.context, step + 1, phase, *given)
        if step == self.plan.until - 1:
            self._in_last_step(fit, phase, *given)

    @property
    def _has_page(self) -> bool:
        """Whether someone reads the page of the step."""
        return not (self.plan.trace or self.plan.snapshots_at or self.plan.at_gradients)

    def _note_step(self, context: FitContext, step: int, phase: str, *given: Any) -> None:
        """Note the loss of a step, and the norm of its gradients."""
        steps = self.page.setdefault("steps", [])
        if not steps or steps[-1]["step"] != step:
            steps.append({"step": step})
        if phase == "backward" and given and isinstance(given[0], Tensor):
            steps[-1].setdefault("losses", []).append(float(given[0].detach()))
        elif phase == "optimizer_step":
            steps[-1]["gradient"] = math.hypot(*_norms(context, lambda one: one.grad).values()) / _scale(context)

    def _note(self, phase: str, context: FitContext, step: int, *given: Any) -> None:
        """Note the digests of a phase of the step after `step` others, or of its end."""
        if self._trace is None:
            self._trace = StepTrace(context.module, context.optimizers, context.device)
        trace = self._trace
        if phase == "forward":
            progress, indices = context.progress, context.loaders.training.last_indices
            trace.note_batch(progress.step + 1, progress.batch, indices, context.metric_logger.batch)
        elif phase == "backward" and given and isinstance(given[0], Tensor):
            trace.note_loss(step + 1, given[0])
        elif phase == "optimizer_step":
            trace.note_gradients(step + 1)
        elif phase == "after_step":
            trace.note_state(step)
        if self.plan.operations:
            self._trace_operations(trace, phase, step)

    def _trace_operations(self, trace: StepTrace, phase: str, step: int) -> None:
        """Trace the operations from the forward pass to the end of the step."""
        if phase == "forward" and self._operations is None:
            self._operations = OperationTrace()
            self._operations.begin()
        elif phase == "after_step" and self._operations is not None:
            trace.note_operations(step, self._operations.end())
            self._operations = None

    def _in_last_step(self, fit: Fit, phase: str, *given: Any) -> None:
        if phase == "forward":
            self._before_step(fit.context)
        elif phase == "backward" and given and isinstance(given[0], Tensor):
            self.loss = given[0].detach()
            self.page["losses"] = [*self.page.get("losses", ()), float(self.loss)]
        elif phase == "optimizer_step":
            self._note_norms(fit.context, "gradient", lambda one: one.grad, _scale(fit.context))
            if self.plan.at_gradients:
                self._end(fit)

    def _before_step(self, context: FitContext) -> None:
        """Note position, samples and weights; call the probe at the first batch of the step."""
        progress, batch = context.progress, context.metric_logger.batch
        indices = context.loaders.training.last_indices
        mine = None if indices is None else [int(index) for index in indices]
        everyone = context.collective.gather(mine)
        if "samples" not in self.page:
            self.batch = batch
            self.page |= {"step": self.plan.until, "epoch": progress.epoch, "batch": progress.batch, "samples": []}
            self.page["learning_rates"] = _learning_rates(context.optimizers)
            self._note_norms(context, "weight", lambda parameter: parameter.detach())
            if self.plan.probe:
                probe = _function_at(self.plan.probe)
                call_user_code(self.plan.probe, probe, context.trainer, context.module, batch)
            if self.plan.debug:
                _debug(context.trainer, context.module, batch)
            if self._has_page and _is_whole(context):
                self._position = context.progress.state_dict()
                # On the host: a GPU that the run fills has no room for its weights twice.
                tensors = _tensors_of(context.module).items()
                self._before = {name: value.detach().to("cpu", copy=True) for name, value in tensors}
        self.page["samples"].append(everyone)
        if self._before:
            self._batches.append((progress.batch, batch))

    def _note_largest(self, context: FitContext) -> None:
        """Note the samples with the largest losses, if a batch has the mean of them.

        A step can also register a buffer or replace it by a larger one. Then none are noted.
        """
        tensors, samples = _tensors_of(context.module), self.page["samples"]
        before, now = ({name: value.shape for name, value in one.items()} for one in (self._before, tensors))
        # All ranks return if one rank's shapes differ: the losses are gathered by all.
        if any(context.collective.gather(before != now)):
            return
        with torch.no_grad():
            for name, value in tensors.items():
                value.copy_(self._before[name])
        found: list[tuple[float, int, int | None]] = []
        for everyone, (index, batch) in zip(samples, self._batches, strict=True):
            losses = context.collective.gather(_losses_by_sample(context, batch, index))
            if any(one is None for one in losses):
                return
            for rank, (mine, indices) in enumerate(zip(losses, everyone, strict=True)):
                numbers = indices if indices and len(indices) == len(mine) else range(len(mine))
                found += zip(mine, [rank] * len(mine), numbers, strict=True)
        largest = sorted(found, key=lambda one: -one[0] if math.isfinite(one[0]) else -math.inf)[:_SHOWN]
        self.page["largest"] = [{"sample": number, "rank": rank, "loss": loss} for loss, rank, number in largest]

    def _note_norms(
        self, context: FitContext, kind: str, of: Callable[[nn.Parameter], Tensor | None], scale: float = 1.0
    ) -> None:
        """Note the norms over the parameters of each layer, divided by `scale`."""
        layers = self.page.setdefault("layers", {})
        squares: dict[str, float] = {}
        for name, norm in _norms(context, of).items():
            layer = name.rpartition(".")[0] or name
            squares[layer] = squares.get(layer, 0.0) + (norm / scale) ** 2
        for layer, square in squares.items():
            layers.setdefault(layer, {})[kind] = math.sqrt(square) if math.isfinite(square) else square

    def _after_step(self, fit: Fit, step: int) -> None:
        if step in self.plan.snapshots_at and fit.checkpointer is not None:
            fit.checkpointer.take()
        if step >= self.plan.until:
            if fit.checkpointer is not None and self.plan.snapshots_at:
                fit.checkpointer.run.flush()
            self._end(fit)

    def _end(self, fit: Fit) -> None:
        """Write the result, and end the fit on all ranks."""
        context = fit.context
        if not self.plan.snapshots_at:  # else the rows are in the snapshots
            context.metric_logger.rows.close()
            self.rows = context.metric_logger.drain_rows()
        if self._before:
            position = context.progress.state_dict()
            context.progress.load_state_dict(self._position)  # the user's step may read it
            self._note_largest(context)
            context.progress.load_state_dict(position)
        if context.world.is_first:
            Path(self.plan.folder, RESULT).write_text(json.dumps({"rows": self.rows, "page": self.page}))
        if self._trace is not None:
            place = Path(self.plan.folder, TRACE.format(rank=context.world.rank))
            place.write_text(json.dumps(self._trace.steps))
        context.collective.gather(None)  # no rank ends while another still exchanges
        raise ReplayEnd(f"replayed up to step {self.plan.until}")


def _learning_rates(optimizers: Sequence[Optimizer]) -> dict[str, float]:
    """Return the learning rate of each parameter group, by optimizer and number."""
    groups = [(one, number, group) for one in optimizers for number, group in enumerate(one.param_groups)]
    return {
        f"{type(one).__name__}, group {number}": float(group["lr"]) for one, number, group in groups if "lr" in group
    }


def _scale(context: FitContext) -> float:
    """Return the factor of gradients that no optimizer has seen yet."""
    return float(context.precision.state_dict().get("scale", 1.0))


def _is_whole(context: FitContext) -> bool:
    """Return whether this process can compute the step of any batch alone."""
    strategy, module = context.strategy, context.module
    is_shared = isinstance(strategy, (ModelParallel, RunsBackward, RunsLanes)) or len(strategy.devices) > 1
    return not is_shared and module.automatic_optimization


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _losses_by_sample(context: FitContext, batch: Any, index: int) -> list[float] | None:
    """Return the loss of each sample of a batch in eval mode; None if it is no mean over them.

    Dropout and batch norm of the training mode depend on the whole batch.
    """
    module, count = context.module, samples_in(batch)
    is_possible = 0 < count <= _TOO_MANY and other_length(batch, count) is None and not _has_others(batch)
    if context.collective.gather(count if is_possible else None) != [count] * context.world.size:
        return None

    def loss_of(part: Any) -> float:
        loss: Tensor = loss_in(context.scope.run(module.training_step, part, index))
        return float(loss)

    alone = _Alone() if context.world.size > 1 else nullcontext()
    module.eval()
    try:
        with torch.no_grad(), context.metric_logger.muted(), alone:
            whole = loss_of(batch)
            each = [loss_of(_sample(batch, number)) for number in range(count)]
    except Exception:  # such a step has no losses by sample
        return None
    is_mean = not math.isfinite(whole) or math.isclose(sum(each) / count, whole, rel_tol=_ROUNDING, abs_tol=1e-6)
    return each if is_mean else None


class _Alone(TorchDispatchMode):
    """Refuses exchanges with other ranks, which might not come to them."""

    def __init__(self) -> None:
        initialize: Any = super().__init__  # which has no types
        initialize()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation.

        Raises:
            RuntimeError: it is an exchange.
        """
        if func.namespace in _EXCHANGES:
            raise RuntimeError(f"{func} in a step that only this rank computes")
        return func(*args, **(kwargs or {}))


def _has_others(batch: Any) -> bool:
    """Return whether `batch` has data that cannot be sliced as tensors can, such as graphs."""
    return any(hasattr(leaf, "to") and not isinstance(leaf, Tensor) for _, leaf in named_leaves(batch))


def _sample(batch: Any, number: int) -> Any:
    """Return a batch of one sample."""
    return convert(batch, lambda tensor: tensor[number : number + 1] if tensor.ndim else tensor)


def _debug(trainer: Any, module: TrainingModule, batch: Any) -> None:
    """Open the debugger; `trainer`, `module` and `batch` can be used there."""
    pdb.set_trace(header="before the step: trainer, module and batch are variables; c continues")


def _function_at(place: str) -> Callable[..., object]:
    """Return the function at `place`, "file.py:function".

    Raises:
        UserError: there is none.
    """
    file, _, name = place.rpartition(":")
    spec = importlib.util.spec_from_file_location("midstride_probe", file)
    if not file or spec is None or spec.loader is None or not Path(file).is_file():
        raise UserError(f"--probe {place}: there is no such file. Name a function as file.py:function")
    probe = importlib.util.module_from_spec(spec)
    call_user_code(file, spec.loader.exec_module, probe)
    found: Callable[..., object] | None = getattr(probe, name, None)
    if not callable(found):
        raise UserError(f"--probe {place}: {file} has no function {name}")
    return found


def _norms(context: FitContext, of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, float]:
    """Return norms by parameter, also of parameters that only other ranks have."""
    values = {name: of(parameter) for name, parameter in context.module.named_parameters()}
    norms = {name: _norm(one) for name, one in values.items() if one is not None and one.is_floating_point()}
    everyone = context.collective.gather(norms) if isinstance(context.strategy, ModelParallel) else [norms]
    return {name: norm for mine in everyone for name, norm in mine.items()}


def _norm(value: Tensor) -> float:
    value = value.detach()
    if value.is_sparse:  # a gradient of an embedding
        value = value.coalesce().values()
    norm = torch.linalg.vector_norm(value, dtype=torch.promote_types(value.dtype, torch.float32))
    whole = getattr(norm, "full_tensor", None)  # of a tensor in shards, which all ranks ask for
    return float(norm if whole is None else whole())


def _watch_values(module: TrainingModule) -> None:
    """Raise an error at the first value of a forward or backward pass that is not finite."""
    torch.autograd.set_detect_anomaly(True)
    for name, layer in module.named_modules():
        if name:
            layer.register_forward_hook(partial(_check_output, name))


def _check_output(name: str, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    """Check the output of the layer called `name`.

    Raises:
        FloatingPointError: it is not finite; the message says whether its input and weights are.
    """
    if not (wrong := _not_finite(output)):
        return
    weights = [path for path, value in layer.named_parameters(recurse=False) if not _is_finite(value)]
    causes = [*(["its input is not finite either"] if _not_finite(inputs) else ["its input is finite"])]
    causes += [f"its {format_names(weights)} is not"] if weights else []
    raise FloatingPointError(
        f"the first value that is not finite: {wrong[0]} in the output of {name} ({type(layer).__name__}); "
        f"{', '.join(causes)}"
    )


def _not_finite(values: Any) -> Sequence[float]:
    found: Iterable[Any] = (value for _, value in named_leaves(values))
    return [
        float(value.detach()[~torch.isfinite(value.detach())].flatten()[0])
        for value in found
        if isinstance(value, Tensor) and not _is_finite(value)
    ]


def _is_finite(value: Tensor) -> bool:
    return not value.is_floating_point() or bool(torch.isfinite(value.detach()).all())
