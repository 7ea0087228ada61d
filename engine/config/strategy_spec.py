"""Types of the table of strategies: a row, a conflict, and the request that is checked."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Conflict", "Start", "StrategyRequest", "StrategySpec"]

#: how a Trainer without a launcher in its environment starts ranks: none are started, the script is run again for each,
#: or they are spawned or forked from the calling process
Start = Literal["none", "subprocess", "spawn", "fork"]


@dataclass(frozen=True)
class StrategyRequest:
    """A chosen strategy and its surroundings. None means unknown, as in a job without its GPUs.

    Args:
        strategy: its name.
        options: its `strategy_args`.
        precision: that of the Trainer.
        ranks: number of processes in the world.
        accelerator: "cpu" or "cuda".
        launcher: what started this process as a rank; None if nothing did.
        interactive: whether there is no script that could be run again, as in a notebook.
        cuda_in_use: whether this process has initialised CUDA.
        lanes: number of equal parts that every batch is cut into; None if it is not cut.
    """

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "32"
    ranks: int = 1
    accelerator: str | None = None
    launcher: str | None = None
    interactive: bool = False
    cuda_in_use: bool = False
    lanes: int | None = None


@dataclass(frozen=True)
class Conflict:
    """Two choices that cannot be combined.

    Args:
        applies: returns whether a request has both.
        message: which choices, why, and what to use instead; names in {} are fields of the request.
    """

    applies: Callable[[StrategyRequest], bool]
    message: str


@dataclass(frozen=True)
class StrategySpec:
    """One strategy.

    Args:
        target: "package.module:Class".
        start: how its ranks are started if no launcher has started them.
        launcher: the launcher that starts them in a job.
        splits_batches: whether a process has several devices and splits its batch over them.
        devices: name of its devices, if they are neither the CPU nor GPUs.
        options: `strategy_args` by name: the type, or a tuple of possible values and types.
        conflicts: choices that it cannot be combined with.
        shards_weights: whether every rank has only a part of the weights.
        in_lanes: "package.module:Class" of the same strategy with `lanes`; "" if it has none.
        remedy: what to do when its library is missing.
    """

    target: str
    start: Start = "none"
    launcher: str = "torchrun"
    splits_batches: bool = False
    devices: str = ""
    options: Mapping[str, type | tuple[str | type, ...]] = field(default_factory=dict)
    conflicts: tuple[Conflict, ...] = ()
    shards_weights: bool = False
    in_lanes: str = ""
    remedy: str = "install torch with distributed support"
