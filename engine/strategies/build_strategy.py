"""Builds strategies by name; the module of a strategy is imported only when it is built."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from midstride.engine.config.import_paths import call_with
from midstride.engine.config.lightning_names import LIGHTNING_STRATEGIES
from midstride.engine.config.overrides import override_faults
from midstride.engine.config.strategies import STRATEGIES
from midstride.engine.errors import JobError, StrategyUnavailable, UserCodeError

if TYPE_CHECKING:
    from midstride.engine.strategies.base import Strategy

__all__ = ["build_strategy", "own_strategy_faults"]


def build_strategy(name: str, options: Mapping[str, Any] | None = None, lanes: int | None = None) -> "Strategy":
    """Return the strategy called `name`, not yet attached to a world.

    Args:
        name: of a row, or "package.module:Class" of your own.
        options: its `strategy_args`.
        lanes: number of equal parts of every batch; only for strategies that support lanes.

    Raises:
        StrategyUnavailable: the name is unknown or that of no strategy, or its library is not installed.
        JobError: your own does not take these options, or its methods are not those of a strategy.
        UserCodeError: importing or building your own raises.
    """
    row = STRATEGIES.get(name)
    target = name if row is None else row.target if lanes is None else row.in_lanes
    module, colon, attribute = target.partition(":")
    if name in LIGHTNING_STRATEGIES:
        raise StrategyUnavailable(f"no strategy {name!r} here: {LIGHTNING_STRATEGIES[name]}")
    if not colon:
        raise StrategyUnavailable(
            f"no strategy {name!r}: choose one of {', '.join(sorted(STRATEGIES))}, "
            'and your own as "package.module:Class" or as an instance'
        )
    arguments: dict[str, Any] = {**(options or {}), **({} if lanes is None else {"lanes": lanes})}
    if row is None:
        own = _own_class(name, module, attribute)
        strategy: Strategy = call_with(own, arguments, name, "strategy_args")
        if faults := own_strategy_faults(strategy):
            raise JobError("\n".join(faults))
        return strategy
    try:
        kind: type[Strategy] = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise _not_installed(name, error, row.remedy) from error
    return kind(**arguments)


def _own_class(name: str, module: str, attribute: str) -> "type[Strategy]":
    """Return the class `attribute` of `module`, a strategy of the user's that is called `name`."""
    from midstride.engine.strategies.base import Strategy

    try:
        kind = getattr(import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        raise _not_installed(name, error, f"install {error.name}, or correct the name") from error
    except Exception as error:
        raise UserCodeError.of(f"import of {module}", error) from error
    if not (isinstance(kind, type) and issubclass(kind, Strategy)):
        what = f"is {kind!r}" if kind is not None else f"is not in {module}"
        raise StrategyUnavailable(
            f"strategy {name!r}: {attribute} {what}; a class is needed that inherits midstride.engine.Strategy"
        )
    if faults := override_faults(kind):  # a class with abstract methods cannot be built
        raise JobError("\n".join(faults))
    return kind


def own_strategy_faults(strategy: "Strategy") -> list[str]:
    """Return messages on missing methods of a user's strategy and on wrong parameters."""
    kind = type(strategy)
    faults = override_faults(kind)
    if not hasattr(strategy, "name"):
        faults.append(f'{kind.__name__} has no name: write name = "..." in the class')
    if not hasattr(strategy, "collective"):
        faults.append(f"{kind.__name__}.__init__ leaves out that of Strategy: call super().__init__(TorchCollective())")
    return faults


def _not_installed(name: str, error: ModuleNotFoundError, remedy: str) -> Exception:
    """Return the error to raise for `error` in the import of the strategy `name`."""
    if (error.name or "").startswith("midstride."):
        return error  # our own broken import is a bug, not a missing extra
    return StrategyUnavailable(f"strategy {name!r} needs {error.name}, not installed here: {remedy}")
