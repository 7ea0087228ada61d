"""What a row of the table of strategies says, and what is asked of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Conflict", "Start", "StrategyRequest", "StrategySpec"]

#: who starts the ranks of a Trainer that finds no launcher in its environment: none is started, the script run again,
#: or processes started from within the caller
Start = Literal["none", "subprocess", "spawn", "fork"]


@dataclass(frozen=True)
class StrategyRequest:
    """A strategy as it was asked for, and where; None where that is not known yet, as in a job read far from its GPUs.

    Args:
        strategy: its name.
        options: its `strategy_args`.
        precision: as the Trainer has it.
        ranks: processes of the world.
        accelerator: "cpu" or "cuda".
        launcher: what started this process as a rank; None if nothing did.
        interactive: there is no script to run again.
        cuda_in_use: this process has initialised CUDA.
        lanes: equal parts that every batch is cut in; None if it is not.
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
    """Two things that do not go together.

    Args:
        applies: whether a request has both.
        message: what, why, and what to use instead; {} are fields of the request.
    """

    applies: Callable[[StrategyRequest], bool]
    message: str


@dataclass(frozen=True)
class StrategySpec:
    """One strategy.

    Args:
        target: "package.module:Class".
        start: who starts its ranks when no launcher has.
        launcher: who starts them in a job.
        splits_batches: a process has several devices and splits its batch over them.
        devices: what its processes train on, as text, where that is neither the CPU nor a GPU.
        options: `strategy_args` by name: a type, or the values there are, among which may be types.
        conflicts: what it cannot go together with.
        shards_weights: no rank has the whole of the weights.
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
