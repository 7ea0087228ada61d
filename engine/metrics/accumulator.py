"""A logged value on its way from batches to an epoch, and from ranks to a run."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from midstride.engine.metrics.values import is_on_host

__all__ = [
    "REDUCTIONS",
    "Accumulator",
    "over_ranks",
    "states_over_ranks",
    "steps_over_ranks",
    "weighted_over_ranks",
]

REDUCTIONS = ("mean", "sum", "min", "max")


@dataclass
class Accumulator:
    """One value over the batches so far.

    Args:
        reduce_fx: mean, sum, min or max.
        sync: reduce over the ranks; otherwise the first rank that has it speaks for all.
        also: a second name of the epoch's value, where the first stands for the steps'.
        total: weighted sum, sum, smallest or largest so far; None before the first batch.
        weight: samples behind a mean.
    """

    reduce_fx: str
    sync: bool
    also: str = ""
    total: Any = None
    weight: float = 0.0

    def add(self, value: Any, weight: float) -> None:
        """Take one batch in."""
        if self.reduce_fx == "mean":
            value = value * weight
            self.weight += weight
        self._join(value)

    def merge(self, other: "Accumulator") -> None:
        """Take another rank's batches in."""
        if other.total is not None:
            self.weight += other.weight
            self._join(other.total)

    def _join(self, value: Any) -> None:
        if self.total is None:
            self.total = value
            return
        self.total, value = _on_one_device(self.total, value)
        if self.reduce_fx in ("mean", "sum"):
            self.total = self.total + value
        elif isinstance(value, Tensor) or isinstance(self.total, Tensor):  # to compare here would be to wait for it
            smaller = value < self.total
            pair = (value, self.total) if self.reduce_fx == "min" else (self.total, value)
            self.total = torch.where(smaller, *pair)
        elif (value < self.total) == (self.reduce_fx == "min"):
            self.total = value

    @property
    def value(self) -> float:
        """The value of the epoch."""
        return float(self.pending_value)

    @property
    def pending_value(self) -> Any:
        """The same; what is on a device stays there, and nothing waits for it."""
        total = self.total if isinstance(self.total, Tensor) else float(self.total)
        if self.reduce_fx != "mean":
            return total
        return total / self.weight if self.weight else float("nan")

    def on_host(self) -> "Accumulator":
        """Return the same with a plain number, which every other rank can read, whatever its devices."""
        return Accumulator(self.reduce_fx, self.sync, self.also, float(self.total), self.weight)


def _on_one_device(total: Any, value: Any) -> tuple[Any, Any]:
    """Return both on one device: the parts of a batch may log on several, and a snapshot's total is on the host.

    What was on the host follows what is not, or each step of a resumed epoch would add up there, with other roundings.
    """
    if not (isinstance(total, Tensor) and isinstance(value, Tensor)) or total.device == value.device:
        return total, value
    device = value.device if is_on_host(total) else total.device
    return total.to(device, non_blocking=True), value.to(device, non_blocking=True)


def over_ranks(ranks: Sequence[dict[str, Accumulator]]) -> dict[str, float]:
    """Return the value of every name that any rank has, given what each rank has."""
    values: dict[str, float] = {}
    for name, merged in _merged(ranks).items():
        values[name] = merged.value
        if merged.also:
            values[merged.also] = merged.value
    return values


def states_over_ranks(ranks: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return one state for every name that any rank has, given the states of each rank: the fields of `Accumulator`."""
    merged = _merged([{name: Accumulator(**state) for name, state in rank.items()} for rank in ranks])
    return {name: asdict(accumulator) for name, accumulator in merged.items()}


def _merged(ranks: Sequence[Mapping[str, Accumulator]]) -> dict[str, Accumulator]:
    """Return one accumulator for every name that any rank has; without `sync`, that of the first rank that has it."""
    merged: dict[str, Accumulator] = {}
    for rank in ranks:
        for name, own in rank.items():
            if name not in merged:
                merged[name] = replace(own)
            elif merged[name].sync:
                merged[name].merge(own)
    return merged


def steps_over_ranks(ranks: Sequence[dict[str, list[tuple[float, float]]]]) -> dict[str, list[float]]:
    """Return, for each step, the mean over the ranks that have it, weighted by samples."""
    return {name: [value for value, _ in steps] for name, steps in weighted_over_ranks(ranks).items()}


def weighted_over_ranks(
    ranks: Sequence[dict[str, list[tuple[float, float]]]],
) -> dict[str, list[tuple[float, float]]]:
    """Return, for each step, that mean and the samples behind it."""
    values: dict[str, list[tuple[float, float]]] = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        lists = [rank[name] for rank in ranks if name in rank]
        steps = [[steps[i] for steps in lists if i < len(steps)] for i in range(max(map(len, lists)))]
        values[name] = [_weighted(step) for step in steps]
    return values


def _weighted(step: list[tuple[float, float]]) -> tuple[float, float]:
    weight = sum(weight for _, weight in step)
    return (sum(value * weight for value, weight in step) / weight if weight else step[0][0]), weight
