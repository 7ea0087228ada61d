"""Optimizers whose step needs a closure, such as LBFGS: they evaluate a batch several times in one step."""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from midstride.engine.config.options import TrainerOptions
from midstride.engine.strategies.base import Strategy
from midstride.engine.strategies.collective import Collective
from midstride.engine.strategies.mixins import LazyDevice, ModelParallel, RunsLanes

__all__ = ["closure_faults", "mean_loss", "needs_closure"]


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether `optimizer.step` requires a closure."""
    return _requires_closure(type(optimizer).step)


@cache
def _requires_closure(step: Callable[..., Any]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def closure_faults(optimizers: Sequence[Optimizer], options: TrainerOptions, strategy: Strategy) -> list[str]:
    """Return messages on options and strategies that cannot be combined with an optimizer that needs a closure."""
    kind = next((type(optimizer).__name__ for optimizer in optimizers if needs_closure(optimizer)), None)
    if kind is None:
        return []
    why = f"{kind} evaluates a batch several times in one step"
    faults = []
    if options.accumulate_grad_batches > 1:
        faults.append(
            f"accumulate_grad_batches={options.accumulate_grad_batches} with {kind}: {why}, and the batches before it "
            "in the window are gone by then. Use a larger batch_size, or another optimizer"
        )
    if options.precision == "16":
        faults.append(f"precision 16 with {kind}: {why}, and the gradient scaler scales it once. Use precision bf16")
    if options.on_nan == "skip":
        faults.append(f"on_nan: skip with {kind}: {why}, and has moved by then. Use on_nan: fail")
    if isinstance(strategy, RunsLanes):
        faults.append(f"lanes with {kind}: {why}, and a lane is run once. Use another optimizer, or leave lanes out")
    if isinstance(strategy, (LazyDevice, ModelParallel)):
        faults.append(f"strategy {strategy.name} with {kind}: {why}. Use single or ddp, or another optimizer")
    return faults


def mean_loss(loss: Tensor, collective: Collective) -> float:
    """Return the mean of `loss` over the ranks, so that the optimizers of all ranks take the same decisions."""
    losses: list[float] = collective.gather(loss.item())
    return sum(losses) / len(losses)
