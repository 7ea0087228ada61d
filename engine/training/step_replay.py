"""A replay of a step: watches a fit up to one step, and ends it there.

The plan of a replay is in the environment, so that it reaches every rank however it was launched. A fit without a plan
pays nothing: the places where a replay looks in are those of injected faults.
"""

import importlib.util
import json
import math
import pdb
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from midstride.engine.errors import StopRequested, UserError
from midstride.engine.formatting import format_names
from midstride.engine.modules.module import TrainingModule
from midstride.engine.session.replay_plan import RESULT, TRACE, ReplayPlan
from midstride.engine.training.context import FitContext
from midstride.engine.training.fit import Fit
from midstride.engine.training.step_trace import StepTrace
from midstride.engine.trees import named_leaves
from midstride.engine.user_code import call_user_code

__all__ = ["ReplayEnd", "StepReplay"]


class ReplayEnd(StopRequested):
    """Ends a fit where its replay ends."""


@dataclass
class StepReplay:
    """Follows a plan: it is told of the phases of each step, as a plan of faults is.

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
    _is_watching: bool = False
    _trace: StepTrace = field(default_factory=StepTrace)

    def at(self, rank: int, step: int, phase: str, *given: Any) -> None:
        """Act at a phase of the step after `step` others; "after_step" comes after its end."""
        fit = self.fit_of()
        if fit is None:
            return
        if self.plan.trace:
            self._trace.note(phase, fit.context, step, *given)
        if phase == "after_step":
            self._after_step(fit, step)
            return
        if phase == "forward" and self.plan.anomaly and not self._is_watching:
            self._is_watching = True
            _watch_values(fit.context.module)
        if step == self.plan.until - 1:
            self._in_last_step(fit, phase, *given)

    def _in_last_step(self, fit: Fit, phase: str, *given: Any) -> None:
        if phase == "forward":
            self._before_step(fit.context)
        elif phase == "backward" and given and isinstance(given[0], Tensor):
            self.loss = given[0].detach()
            self.page["losses"] = [*self.page.get("losses", ()), float(self.loss)]
        elif phase == "optimizer_step":
            self._note_norms(fit.context.module, "gradient", lambda parameter: parameter.grad)
            if self.plan.at_gradients:
                self._end(fit)

    def _before_step(self, context: FitContext) -> None:
        """Note position, samples and weights; call the probe at the first batch of the step."""
        progress, batch = context.progress, context.metric_logger.batch
        indices = context.loaders.training.last_indices
        mine = None if indices is None else [int(index) for index in indices]
        everyone = context.collective.gather(mine)
        if not self.page:
            self.batch = batch
            self.page = {"step": self.plan.until, "epoch": progress.epoch, "batch": progress.batch, "samples": []}
            self.page["learning_rates"] = _learning_rates(context.optimizers)
            self._note_norms(context.module, "weight", lambda parameter: parameter.detach())
            if self.plan.probe:
                probe = _function_at(self.plan.probe)
                call_user_code(self.plan.probe, probe, context.trainer, context.module, batch)
            if self.plan.debug:
                _debug(context.trainer, context.module, batch)
        self.page["samples"].append(everyone)

    def _note_norms(self, module: nn.Module, kind: str, of: Callable[[nn.Parameter], Tensor | None]) -> None:
        """Note the norms over the parameters of each layer."""
        layers = self.page.setdefault("layers", {})
        squares: dict[str, float] = {}
        for name, parameter in module.named_parameters():
            value = of(parameter)
            if value is not None and value.is_floating_point():
                layer = name.rpartition(".")[0] or name
                squares[layer] = squares.get(layer, 0.0) + _norm(value) ** 2
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
        if context.world.is_first:
            Path(self.plan.folder, RESULT).write_text(json.dumps({"rows": self.rows, "page": self.page}))
        if self.plan.trace:
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


def _debug(trainer: Any, module: TrainingModule, batch: Any) -> None:
    """Open the debugger; `trainer`, `module` and `batch` can be used there."""
    pdb.set_trace(header="before the step: trainer, module and batch are here; c continues")


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


def _norm(value: Tensor) -> float:
    norm = torch.linalg.vector_norm(value.detach(), dtype=torch.promote_types(value.dtype, torch.float32))
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
