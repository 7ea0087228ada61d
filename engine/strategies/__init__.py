"""Strategies by name. A row is data: nothing is imported until its name is asked for.

base          what a strategy is: how one module trains on many devices
batch_split   cutting a batch into parts, and joining what came out of them, by the rules of `nn.DataParallel`
collective    ranks that meet in a process group of torch's: over NCCL on GPUs, over gloo elsewhere
ddp           one full replica per process, gradients averaged during backward
ddp2          a replica per process, each splitting its batch over several devices: dp inside a node, ddp
              across nodes
dp            one process that splits every batch over several devices
horovod       a full replica per process, gradients averaged in one flat buffer after the backward pass
rendezvous    where the ranks of a process group meet: in a store of torch's
replicas      replicas of a module, one for each part of a batch, within one process: what `nn.DataParallel`
              does, repeatably
sharded       each rank has its rows of every weight, of its gradient and of what the optimizer keeps of it
side_channel  how the ranks talk to each other beside training
single        one process, one device
xla           a full replica per core of a TPU, or whatever else torch_xla finds, gradients averaged by its
              collectives
pipeline/     a sequence of layers as stages, one process each
"""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from midstride.engine.config.strategies import STRATEGIES, Row
from midstride.engine.errors import StrategyUnavailable

if TYPE_CHECKING:
    from midstride.engine.strategies.base import Strategy

__all__ = ["STRATEGIES", "Row", "build_strategy"]


def build_strategy(name: str, options: Mapping[str, Any] | None = None) -> "Strategy":
    """Return the strategy called `name`, not yet attached to a world.

    Args:
        name: of a row, or "package.module:Class" of your own.
        options: its `strategy_args`.

    Raises:
        StrategyUnavailable: no such name, or its library is not installed.
    """
    row = STRATEGIES.get(name)
    target = name if row is None else row.target
    module, colon, attribute = target.partition(":")
    if not colon:
        raise StrategyUnavailable(
            f"no strategy {name!r}; there are: {', '.join(sorted(STRATEGIES))}, "
            'and your own as "package.module:Class" or as an instance'
        )
    try:
        strategy: type[Strategy] = getattr(import_module(module), attribute)
    except AttributeError as error:
        raise StrategyUnavailable(f"strategy {name!r}: {error}") from error
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("midstride."):
            raise  # our own broken import is a bug, not a missing extra
        remedy = f"install {error.name}, or mend the name" if row is None else row.remedy
        raise StrategyUnavailable(f"strategy {name!r} needs {error.name}, not installed here: {remedy}") from error
    return strategy(**(options or {}))
