"""What a rank has of an epoch that ends, and what the ranks make of their shares."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from midstride.engine.metrics.accumulator import Accumulator, over_ranks
from midstride.engine.metrics.torchmetrics_state import TorchmetricsState
from midstride.engine.metrics.values import numbers_in

__all__ = ["EpochShare", "logged_once", "newest_over_ranks", "reduced_over_ranks", "union"]


class EpochShare(NamedTuple):
    """What a rank has of an epoch (or evaluation) that ends.

    Args:
        running: what it logged, reduced over its batches.
        paths: of the metrics that it logged, by name.
        steps: of an evaluation, what it logged for each step, with its weight.
        newest_step: what it logged for the newest step of the training, if there are other ranks.
        common_names: of the logger.
    """

    running: dict[str, Accumulator]
    paths: dict[str, str]
    steps: dict[str, list[tuple[float, float]]]
    newest_step: dict[str, Accumulator]
    common_names: dict[str, str]


def reduced_over_ranks(shares: Sequence[EpochShare], metrics: TorchmetricsState, *, reset: bool) -> dict[str, float]:
    """Return the values of what all ranks have; `metrics` begin anew if `reset`."""
    reduced = over_ranks([rank.running for rank in shares])
    paths = union([rank.paths for rank in shares])
    for name, value in zip(paths, metrics.compute(list(paths.values()), reset=reset), strict=True):
        reduced.update(numbers_in(name, value))
    return reduced


def newest_over_ranks(shares: Sequence[EpochShare]) -> tuple[set[str], dict[str, float]]:
    """Return the names of what the newest step logged on any rank, and its values under all of their names."""
    found = over_ranks([rank.newest_step for rank in shares])
    common = union([rank.common_names for rank in shares])
    return {*found}, {**found, **{common[name]: value for name, value in found.items() if name in common}}


def logged_once(reduced: Mapping[str, float], shares: Sequence[EpochShare]) -> dict[str, float]:
    """Return, of `reduced`, what was logged for the epoch alone, under names that another stage logs for steps, too."""
    common = union([rank.common_names for rank in shares])
    once = {*common.values()} - {common[name] for name in reduced if name in common}
    return {name: value for name, value in reduced.items() if name in once}


def union(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return what any rank has by name; of several, what the first of them has."""
    return {name: value for rank in reversed(ranks) for name, value in rank.items()}
