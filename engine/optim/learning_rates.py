"""Learning rates, wherever torch keeps them: in optimizers' groups and in schedulers."""

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

__all__ = ["scale_learning_rates"]

#: entries of a parameter group; schedulers leave some of them there
_IN_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
#: attributes of schedulers: rates, or lists of them with one for each group
_IN_SCHEDULERS = ("base_lrs", "max_lrs", "min_lrs", "eta_min", "_last_lr")
#: attributes that hold further schedulers
_NESTED = ("_schedulers",)


def scale_learning_rates(optimizers: Iterable[Optimizer], schedulers: Iterable[Any], factor: float) -> None:
    """Multiply every learning rate of `optimizers` and `schedulers` by `factor`.

    Afterwards they are as if `configure_optimizers` had written every rate that much larger.

    Args:
        optimizers: each of them once.
        schedulers: of torch, nested ones included, or with attributes of the same names.
        factor: of the number of processes, usually.
    """
    if factor == 1:
        return
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            _scale(group, _IN_GROUPS, factor)
    for scheduler in schedulers:
        attributes = vars(scheduler)
        _scale(attributes, _IN_SCHEDULERS, factor)
        scale_learning_rates([], [nested for name in _NESTED for nested in attributes.get(name, ())], factor)


def _scale(attributes: dict[str, Any], names: Iterable[str], factor: float) -> None:
    for name in names:
        if (rate := attributes.get(name)) is not None:
            attributes[name] = [entry * factor for entry in rate] if isinstance(rate, list) else rate * factor
