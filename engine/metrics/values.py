"""The numbers in logged values."""

import logging
from typing import Any

import torch
from torch import Tensor

from midstride.engine.errors import UserError
from midstride.engine.metrics.torchmetrics_internals import batch_value

__all__ = [
    "NOT_TAKEN",
    "OF_TIME",
    "copied",
    "has_number",
    "is_on_host",
    "number",
    "numbers_in",
    "of_batch",
    "warn_not_taken",
]

log = logging.getLogger(__name__)

#: ends of the names by which transformers' Trainers log durations and speeds, which differ between two runs
OF_TIME = ("_runtime", "_per_second")
#: situation in which no value is accepted -> the message of `self.log`
NOT_TAKEN = {
    "setup": "in setup, before there is a row for it: log in on_train_start or later.",
    "reduced": "after the values of this evaluation were reduced: log in its on_..._epoch_end instead.",
    "trained": "after the last row: the value is dropped. Log in on_train_epoch_end instead.",
    "predict": "in a prediction, which has no metric log: return the value from predict_step instead.",
}


def warn_not_taken(name: str, where: str) -> None:
    """Warn that the value called `name` is dropped; `where` is a key of NOT_TAKEN."""
    log.warning("self.log(%r) %s", name, NOT_TAKEN[where])


def is_on_host(tensor: Tensor) -> bool:
    """Return whether `tensor` can be read without a wait for its device."""
    return tensor.is_cpu  # ten times as fast as comparing its device


def number(name: str, value: Tensor) -> Any:
    """Return the one number in `value`. On an accelerator it stays a tensor, without a wait."""
    if value.numel() != 1:
        raise UserError(
            f"self.log({name!r}) was given a tensor of shape {tuple(value.shape)}: one number is needed. "
            "Log its mean(), or one entry."
        )
    if is_on_host(value):
        return value.item()
    return copied(value)


def copied(value: Tensor) -> Tensor:
    """Return a copy of the one number in `value` on its device; nothing waits for it."""
    # A copy: CUDA graphs and in-place counters reuse the memory for the next number.
    return value.detach().reshape(()).to(torch.float64, copy=True)


def has_number(metric: Any) -> bool:
    """Return whether the metric was called with the last batch and returned one number."""
    value = batch_value(metric)
    return isinstance(value, Tensor) and value.numel() == 1


def of_batch(name: str, metric: Any) -> Any:
    """Return the last batch's value of a metric that was called, not updated."""
    value = batch_value(metric)
    if not isinstance(value, Tensor):
        raise UserError(
            f"self.log({name!r}, on_step=True): the {type(metric).__name__} has no single value for this batch. "
            "Call it, as in self.accuracy(x, y), instead of update; of a wrapper that keeps none, such as Running, log "
            "what the call returns; of a collection log the values one by one."
        )
    return number(name, value)


def numbers_in(name: str, value: Any) -> dict[str, float]:
    """Return the numbers in the result of a metric by name."""
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
