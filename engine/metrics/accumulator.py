"""One logged value, reduced over the batches of an epoch and over the ranks."""

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
        sync: whether to reduce over the ranks; otherwise the value of the first rank that has it is used.
        also: a second name of the epoch's value, if steps log values of the first name.
        total: weighted sum, sum, minimum or maximum so far; None before the first batch.
        weight: number of samples of a mean.
    """

    reduce_fx: str
    sync: bool
    also: str = ""
    total: Any = None
    weight: float = 0.0

    def add(self, value: Any, weight: float) -> None:
        """Add the value of one batch."""
        if self.reduce_fx == "mean":
            value = value * weight
            self.weight += weight
        self._join(value)

    def merge(self, other: "Accumulator") -> None:
        """Add the batches of another rank."""
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
        elif isinstance(value, Tensor) or isinstance(self.total, Tensor):  # a comparison would wait for the device
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
        """The value of the epoch; a tensor stays on its device, and nothing waits for it."""
        total = self.total if isinstance(self.total, Tensor) else float(self.total)
        if self.reduce_fx != "mean":
            return total
        return total / self.weight if self.weight else float("nan")

    def on_host(self) -> "Accumulator":
        """Return a copy with a plain number, which ranks on other devices can read."""
        return Accumulator(self.reduce_fx, self.sync, self.also, float(self.total), self.weight)


def _on_one_device(total: Any, value: Any) -> tuple[Any, Any]:
    """Return both values on one device.

    Chunks of a batch can log on several devices, and a restored total is on the CPU.

    A value on the host moves to the device of the other. Otherwise a resumed epoch would add on the host, with other
    roundings.
    """
    if not (isinstance(total, Tensor) and isinstance(value, Tensor)) or total.device == value.device:
        return total, value
    device = value.device if is_on_host(total) else total.device
    return total.to(device, non_blocking=True), value.to(device, non_blocking=True)


def over_ranks(ranks: Sequence[dict[str, Accumulator]]) -> dict[str, float]:
    """Return the reduced values of all ranks by name."""
    values: dict[str, float] = {}
    for name, merged in _merged(ranks).items():
        values[name] = merged.value
        if merged.also:
            values[merged.also] = merged.value
    return values


def states_over_ranks(ranks: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the merged states of all ranks by name, as dicts of `Accumulator`'s fields."""
    merged = _merged([{name: Accumulator(**state) for name, state in rank.items()} for rank in ranks])
    return {name: asdict(accumulator) for name, accumulator in merged.items()}


def _merged(ranks: Sequence[Mapping[str, Accumulator]]) -> dict[str, Accumulator]:
    """Return the merged accumulators of all ranks by name; without `sync`, the first rank's."""
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
    """Return for each step the mean over ranks, weighted by samples, and the number of samples."""
    values: dict[str, list[tuple[float, float]]] = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        lists = [rank[name] for rank in ranks if name in rank]
        steps = [[steps[i] for steps in lists if i < len(steps)] for i in range(max(map(len, lists)))]
        values[name] = [_weighted(step) for step in steps]
    return values


def _weighted(step: list[tuple[float, float]]) -> tuple[float, float]:
    weight = sum(weight for _, weight in step)
    return (sum(value * weight for value, weight in step) / weight if weight else step[0][0]), weight
