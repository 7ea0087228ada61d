"""Optimizers with a closure, such as LBFGS, which evaluate a batch repeatedly in a step."""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from midstride.engine.config.options import TrainerOptions
from midstride.engine.errors import UserError
from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.collective import Collective
from midstride.engine.strategies.mixins import LazyDevice, ModelParallel, RunsLanes
from midstride.engine.strategies.torch_internals import version_of

__all__ = ["closure_faults", "closure_returning", "mean_loss", "needs_closure", "step_without_closure"]

#: how to write the step of an optimizer that evaluates a batch several times
_HOW = "Declare it as `def step(self, closure)`, without a default: then every call of its closure computes gradients"


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether `optimizer.step` requires a closure."""
    return _requires_closure(type(optimizer).step)


@cache
def _requires_closure(step: Callable[..., Any]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def step_without_closure(step: Callable[[Optimizer], Any], optimizer: Optimizer) -> None:
    """Call `step(optimizer)`; note in its error if a closure seems to be missing."""
    try:
        step(optimizer)
    except Exception as error:
        kind = type(optimizer)
        if _is_of_missing_closure(error) and "closure" in inspect.signature(kind.step).parameters:
            error.add_note(f"{kind.__name__}.step was called without a closure. {_HOW}")
        raise


def _is_of_missing_closure(error: Exception) -> bool:
    text = str(error)
    return "closure" in text or (isinstance(error, TypeError) and "'NoneType' object is not callable" in text)


def closure_returning(loss: Tensor | None, optimizer: Optimizer) -> Callable[[], Tensor | None]:
    """Return a closure for a step whose gradients exist; it returns `loss`.

    It raises UserError if the optimizer has moved its parameters by then: for these no loss was computed.
    """
    parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    versions = [*map(version_of, parameters)]

    def closure() -> Tensor | None:
        if versions != [*map(version_of, parameters)]:
            kind = type(optimizer).__name__
            raise UserError(
                f"{kind}.step called its closure after it had changed parameters, but this closure computes nothing: "
                f"the gradients are those from before the change. {_HOW}"
            )
        return loss

    return closure


def closure_faults(optimizers: Sequence[Optimizer], options: TrainerOptions, strategy: Strategy) -> list[str]:
    """Return messages on options and strategies that an optimizer with a closure excludes."""
    kind = next((type(optimizer).__name__ for optimizer in optimizers if needs_closure(optimizer)), None)
    if kind is None:
        return []
    why = f"{kind} evaluates a batch several times in a step"
    faults = []
    if options.accumulate_grad_batches > 1:
        faults.append(
            f"accumulate_grad_batches={options.accumulate_grad_batches} with {kind}: {why}, and earlier batches of the "
            "window are gone by then. Use a larger batch_size, or another optimizer"
        )
    if options.precision == "16":
        faults.append(f"precision 16 with {kind}: {why}, and the gradient scaler scales it once. Use precision bf16")
    if options.on_nan == "skip":
        faults.append(f"on_nan: skip with {kind}: {why}, and has changed the weights by then. Use on_nan: fail")
    if isinstance(strategy, RunsLanes):
        faults.append(f"lanes with {kind}: {why}, and a lane runs once. Use another optimizer, or leave lanes out")
    if isinstance(strategy, (LazyDevice, ModelParallel)):
        faults.append(f"strategy {strategy.name} with {kind}: {why}. Use single or ddp, or another optimizer")
    return faults


def mean_loss(loss: Tensor, collective: Collective) -> float:
    """Return the mean of `loss` over the ranks, so that all optimizers decide the same."""
    losses: list[float] = collective.gather(loss.item())
    return sum(losses) / len(losses)
