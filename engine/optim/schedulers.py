"""Learning rate schedulers: times of steps, their state, and the rates stored by torch."""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, SequentialLR

from midstride.engine.errors import UserError
from midstride.engine.state.codec import is_writable
from midstride.engine.state.stateful import AlikeOnRanks
from midstride.engine.user_code import call_user_code

__all__ = ["SchedulerConfig", "SchedulerList", "saved_schedulers", "scale_learning_rates", "scheduler_objects"]

log = logging.getLogger(__name__)

_OF_A_STEP = (
    "on several processes, a value that a step logs with sync_dist is reduced later: watch a value of a validation or "
    "of an epoch"
)
#: entries of a parameter group; schedulers leave some of them there
_IN_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
#: attributes of schedulers: rates, or lists of them with one for each group
_IN_SCHEDULERS = ("base_lrs", "max_lrs", "min_lrs", "eta_min", "_last_lr")
#: attributes that hold further schedulers
_NESTED = ("_schedulers",)


@dataclass
class SchedulerConfig:
    """One scheduler, and when it steps.

    Args:
        scheduler: a torch scheduler.
        interval: "epoch" or "step".
        frequency: epochs between two steps of the scheduler; with interval "step", batches, counted in each epoch.
        monitor: name of the logged value that it watches.
        reduce_on_plateau: whether it steps with that value, as ReduceLROnPlateau does.
        strict: whether a missing value is an error; otherwise the scheduler does not step without it.
        name: the user's name of the scheduler.
    """

    scheduler: Any
    interval: Literal["epoch", "step"] = "epoch"
    frequency: int = 1
    monitor: str | None = None
    reduce_on_plateau: bool = False
    strict: bool = True
    name: str | None = None
    #: whether a missing value was reported; not a field, since users choose those
    _has_warned = False

    def due(self, count: int) -> bool:
        """Return whether it steps after `count` epochs, or batches of an epoch."""
        return count % self.frequency == 0

    def step(self, values: dict[str, float], by: Callable[[Any, float | None], None] | None = None) -> None:
        """Step the scheduler by the user's function `by`, if any, with its value if it watches one."""
        if self.reduce_on_plateau and self.monitor not in values:
            self._miss(values)
            return
        value = float(values[self.monitor or ""]) if self.reduce_on_plateau else None
        if by is not None:
            by(self.scheduler, value)
        else:
            given = () if value is None else (value,)
            call_user_code(f"{type(self.scheduler).__name__}.step", self.scheduler.step, *given)

    def _miss(self, values: dict[str, float]) -> None:
        """Report a missing value.

        Raises:
            UserError: the config is strict.
        """
        kind, known = type(self.scheduler).__name__, ", ".join(sorted(values)) or "nothing"
        if not self.strict:
            if not self._has_warned:
                self._has_warned = True
                text = "%s watches %r, which is not logged yet: until then the learning rate does not change"
                log.warning(text, kind, self.monitor)
            return
        why = "; " + _OF_A_STEP if self.interval == "step" else ""
        raise UserError(
            f"{kind} watches {self.monitor!r}, not logged; logged so far: {known}{why}. "
            'With "strict": False beside the scheduler it waits for the value.'
        )


class SchedulerList(AlikeOnRanks):
    """The states of all schedulers, as one part of the state of a run."""

    description = "the state of a scheduler"

    def __init__(self, schedulers: list[SchedulerConfig]) -> None:
        self._schedulers = schedulers

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each scheduler by number."""
        return {str(number): _state_of(config.scheduler) for number, config in enumerate(self._schedulers)}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the state of each scheduler."""
        for number, config in enumerate(self._schedulers):
            config.scheduler.load_state_dict(copy.deepcopy(state_dict[str(number)]))  # some remove entries from it


def saved_schedulers(scheduler: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield a scheduler, and those whose states its `state_dict` holds, by name."""
    yield name, scheduler
    if getattr(type(scheduler), "state_dict", None) in (SequentialLR.state_dict, ChainedScheduler.state_dict):
        for number, inner in enumerate(vars(scheduler)[_NESTED[0]]):
            yield from saved_schedulers(inner, f"{name}.{number}")


def scheduler_objects(scheduler: Any) -> dict[str, Any]:
    """Return objects in a torch scheduler's `state_dict` that are no plain values.

    Examples are a nested scheduler, a random generator and a function.
    """
    if getattr(type(scheduler), "state_dict", None) is not LRScheduler.state_dict:
        return {}
    return {name: value for name, value in scheduler.state_dict().items() if not is_writable(value)}


def _state_of(scheduler: Any) -> dict[str, Any]:
    objects = scheduler_objects(scheduler)
    return {name: value for name, value in scheduler.state_dict().items() if name not in objects}


def scale_learning_rates(optimizers: Iterable[Optimizer], schedulers: Iterable[Any], factor: float) -> None:
    """Multiply every learning rate of `optimizers` and `schedulers` by `factor`.

    The result is as if `configure_optimizers` had used rates larger by `factor`.

    Args:
        optimizers: the optimizers, each once.
        schedulers: schedulers of torch, also nested ones, or with attributes of the same names.
        factor: usually the number of processes.
    """
    if factor == 1:
        return
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            _scale(group, _IN_GROUPS, factor)
    for scheduler in schedulers:
        attributes = vars(scheduler)
        _scale(attributes, _IN_SCHEDULERS, factor)
        scale_learning_rates([], [nested for name in _NESTED for nested in attributes.get(name, ())], factor)


def _scale(attributes: dict[str, Any], names: Iterable[str], factor: float) -> None:
    for name in names:
        if (rate := attributes.get(name)) is not None:
            attributes[name] = [entry * factor for entry in rate] if isinstance(rate, list) else rate * factor
