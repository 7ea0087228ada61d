"""Values as `self.log` is given them, and the numbers in them."""

import logging
from typing import Any

import torch
from torch import Tensor

from midstride.engine.errors import UserError
from midstride.engine.metrics.torchmetrics_internals import batch_value

__all__ = ["NOT_TAKEN", "copied", "has_number", "is_on_host", "number", "numbers_in", "of_batch", "warn_not_taken"]

log = logging.getLogger(__name__)

#: where no value is taken -> what `self.log` says there
NOT_TAKEN = {
    "setup": "in setup, before there is a row for it: log in on_train_start or later.",
    "reduced": "comes after the values of this evaluation were put together: log in its on_..._epoch_end instead.",
    "trained": "comes after the last row, and is in none: log in on_train_epoch_end instead.",
    "predict": "in a prediction: there is nothing to log to. Return what you want to keep.",
}


def warn_not_taken(name: str, where: str) -> None:
    """Say that the value called `name` is not taken, and what to do; `where` is a key of NOT_TAKEN."""
    log.warning("self.log(%r) %s", name, NOT_TAKEN[where])


def is_on_host(tensor: Tensor) -> bool:
    """Return whether `tensor` can be read without a wait for its device."""
    return tensor.is_cpu  # a tenth of what asking for the name of its device takes


def number(name: str, value: Tensor) -> Any:
    """Return the one number in `value`; of a device other than the CPU, as a tensor there that nothing waits for."""
    if value.numel() != 1:
        raise UserError(
            f"self.log({name!r}) was given a tensor of shape {tuple(value.shape)}: one number is needed. "
            "Log its mean(), or the entry you mean."
        )
    if is_on_host(value):
        return value.item()
    return copied(value)


def copied(value: Tensor) -> Tensor:
    """Return the one number in `value` as it is now, on its device; nothing waits for it."""
    # Not the memory itself: what replays CUDA graphs, or counts in place, has the next number there.
    return value.detach().reshape(()).to(torch.float64, copy=True)


def has_number(metric: Any) -> bool:
    """Return whether the metric was called with the last batch, and made one number of it."""
    value = batch_value(metric)
    return isinstance(value, Tensor) and value.numel() == 1


def of_batch(name: str, metric: Any) -> Any:
    """Return the value of the last batch alone, which a metric knows if it was called rather than updated."""
    value = batch_value(metric)
    if not isinstance(value, Tensor):
        raise UserError(
            f"self.log({name!r}, on_step=True): the {type(metric).__name__} has no single value for this batch. "
            "Call it, as in self.accuracy(x, y), instead of update; of a wrapper that keeps none, such as Running, log "
            "what the call returns; of a collection log the values one by one."
        )
    return number(name, value)


def numbers_in(name: str, value: Any) -> dict[str, float]:
    """Return the numbers in what a metric computed, each under a name of its own."""
    entries: Any
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, (list, tuple)):
        entries = enumerate(value)
    elif isinstance(value, Tensor) and value.numel() != 1:
        entries = enumerate(value.reshape(-1))
    else:
        return {name: float(value)}
    return {key: number for inner, entry in entries for key, number in numbers_in(f"{name}/{inner}", entry).items()}
