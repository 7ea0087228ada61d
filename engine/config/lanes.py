"""Settings that lanes exclude. No torch."""

from midstride.engine.config.strategies import STRATEGIES
from midstride.engine.config.strategy_spec import StrategyRequest

__all__ = ["MOST_LANES", "lane_conflicts"]

#: a batch of more has more lanes than there are devices to run them
MOST_LANES = 1024


def lane_conflicts(request: StrategyRequest) -> list[str]:
    """Return a message for each part of `request` that its lanes exclude."""
    lanes, ranks, strategy = request.lanes, request.ranks, request.strategy
    if lanes is None:
        return []
    spec = STRATEGIES.get(strategy)
    errors = []
    if spec is None:
        errors.append(f"lanes with {strategy}: your own strategy has its own order of sums: leave lanes out")
    elif not spec.in_lanes:
        errors.append(
            f"lanes with strategy {strategy}: the strategies that add up lane by lane are single and ddp: leave lanes "
            "out, or use ddp"
        )
    if not _is_power_of_two(lanes) or lanes > MOST_LANES:
        errors.append(f"lanes: a power of two from 1 to {MOST_LANES} is needed, not {lanes!r}")
    elif not _is_power_of_two(ranks) or ranks > lanes:
        errors.append(f"{ranks} processes cannot share {lanes} lanes: a power of two up to {lanes} can")
    if request.precision == "16":
        errors.append(
            "precision 16 with lanes: the scale of the loss depends on the number of ranks, which lanes leave open: "
            "use precision bf16"
        )
    if request.options:
        errors.append(
            f"strategy_args {dict(request.options)} with lanes: they configure DistributedDataParallel, but lanes "
            f"add up gradients themselves, also with unused parameters: leave them out"
        )
    return errors


def _is_power_of_two(value: object) -> bool:
    return type(value) is int and value > 0 and value & (value - 1) == 0
