"""Builds strategies by name; the module of a strategy is imported only when it is built."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from midstride.engine.config.lightning_names import LIGHTNING_STRATEGIES
from midstride.engine.config.strategies import STRATEGIES
from midstride.engine.errors import StrategyUnavailable

if TYPE_CHECKING:
    from midstride.engine.strategies.base import Strategy

__all__ = ["build_strategy"]


def build_strategy(name: str, options: Mapping[str, Any] | None = None, lanes: int | None = None) -> "Strategy":
    """Return the strategy called `name`, not yet attached to a world.

    Args:
        name: of a row, or "package.module:Class" of your own.
        options: its `strategy_args`.
        lanes: number of equal parts of every batch; only for strategies that support lanes.

    Raises:
        StrategyUnavailable: the name is unknown, or its library is not installed.
    """
    row = STRATEGIES.get(name)
    target = name if row is None else row.target if lanes is None else row.in_lanes
    module, colon, attribute = target.partition(":")
    if name in LIGHTNING_STRATEGIES:
        raise StrategyUnavailable(f"no strategy {name!r} here: {LIGHTNING_STRATEGIES[name]}")
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
    arguments: dict[str, Any] = {**(options or {}), **({} if lanes is None else {"lanes": lanes})}
    return strategy(**arguments)
