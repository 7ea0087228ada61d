"""Strategies by name. A row is data: nothing is imported until its name is asked for."""

from importlib import import_module
from typing import TYPE_CHECKING

from midstride.engine.errors import StrategyUnavailable

if TYPE_CHECKING:
    import torch

    from midstride.engine.strategies.base import Strategy
    from midstride.engine.world import World

__all__ = ["STRATEGIES", "build_strategy"]

#: name -> (where the class lives, what to do when its import fails)
STRATEGIES: dict[str, tuple[str, str]] = {
    "single": ("midstride.engine.strategies.single:Single", "install torch"),
    "ddp": ("midstride.engine.strategies.ddp:Ddp", "install torch with distributed support"),
}


def build_strategy(name: str, world: "World", device: "torch.device") -> "Strategy":
    """Return the strategy called `name` for this `world`.

    Raises:
        StrategyUnavailable: no such name, or its library is not installed.
    """
    if name not in STRATEGIES:
        raise StrategyUnavailable(f"no strategy {name!r}; there are: {', '.join(sorted(STRATEGIES))}")
    target, remedy = STRATEGIES[name]
    module, _, attribute = target.partition(":")
    try:
        strategy: type[Strategy] = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("midstride."):
            raise  # our own broken import is a bug, not a missing extra
        raise StrategyUnavailable(f"strategy {name!r} needs {error.name}, not installed here: {remedy}") from error
    return strategy(world, device)
