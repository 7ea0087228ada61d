"""What `configure_optimizers` may return, read into one shape."""

import copy
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from midstride.engine.errors import UnsupportedState, UserError
from midstride.engine.formatting import format_names
from midstride.engine.optim.trained_parameters import TrainedParameters
from midstride.engine.state.codec import encode_lazily
from midstride.engine.state.stateful import AlikeOnRanks
from midstride.engine.user_code import call_user_code

__all__ = ["OptimizerList", "SchedulerConfig", "SchedulerList", "lazy_tensors", "read_optimizers", "scheduler_objects"]

log = logging.getLogger(__name__)

_OF_A_STEP = (
    "on several processes, what a step logs with sync_dist is reduced where the ranks next meet: watch a value of a "
    "validation or of an epoch"
)


@dataclass
class SchedulerConfig:
    """One scheduler and when it steps.

    Args:
        scheduler: a torch scheduler.
        interval: "epoch" or "step".
        frequency: epochs between two of its steps; of interval "step", batches, counted anew in each epoch.
        monitor: the logged value that it watches.
        reduce_on_plateau: whether it steps with that value, as ReduceLROnPlateau does.
        strict: whether the value has to be there; without it the scheduler does not step.
        name: what the user calls it.
    """

    scheduler: Any
    interval: Literal["epoch", "step"] = "epoch"
    frequency: int = 1
    monitor: str | None = None
    reduce_on_plateau: bool = False
    strict: bool = True
    name: str | None = None
    #: whether it was said that the value is missing; no field, which a user might choose
    _has_warned = False

    def due(self, count: int) -> bool:
        """Return whether it steps after `count` epochs, or batches of an epoch."""
        return count % self.frequency == 0

    def step(self, values: dict[str, float], by: Callable[[Any, float | None], None] | None = None) -> None:
        """Step the scheduler, with the value if it watches one; `by` a function of the user's if given."""
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
        """Say that the value is not there.

        Raises:
            UserError: it has to be.
        """
        kind, known = type(self.scheduler).__name__, ", ".join(sorted(values)) or "nothing"
        if not self.strict:
            if not self._has_warned:
                self._has_warned = True
                text = "%s watches %r, which is not logged so far: until it is, the learning rate stays"
                log.warning(text, kind, self.monitor)
            return
        why = "; " + _OF_A_STEP if self.interval == "step" else ""
        raise UserError(
            f"{kind} watches {self.monitor!r}, not logged; logged so far: {known}{why}. "
            'With "strict": False beside the scheduler it waits until the value is there.'
        )


class OptimizerList:
    """All optimizers as one part of a run's state.

    Args:
        optimizers: returns those there are; as training begins, before it gives them more to train, they are those
            that every attempt makes.
        module: what they train.
    """

    def __init__(self, optimizers: Callable[[], list[Optimizer]], module: nn.Module) -> None:
        self._now, self._module = optimizers, module
        self._kinds = [type(optimizer) for optimizer in optimizers()]
        self._trained = [
            TrainedParameters(optimizer, module, f"optimizer {number} ({type(optimizer).__name__})")
            for number, optimizer in enumerate(optimizers())
        ]

    @property
    def _optimizers(self) -> list[Optimizer]:
        optimizers = self._now()
        if (kinds := [type(optimizer) for optimizer in optimizers]) != self._kinds:
            was, now = (", ".join(kind.__name__ for kind in some) or "none" for some in (self._kinds, kinds))
            raise UserError(
                f"trainer.optimizers was replaced in training: {was} became {now}; a resumed run begins with {was}. "
                "Return them from configure_optimizers, or replace them in on_fit_start, which every attempt calls."
            )
        return optimizers

    def state_dict(self) -> dict[str, Any]:
        """Return every optimizer's state, by number, and of which parameters it is where training changed that.

        Raises:
            UserError: one trains what is no parameter of the module: no other attempt could find it.
        """
        optimizers = self._optimizers
        states: dict[str, Any] = {str(number): _saved(number, one) for number, one in enumerate(optimizers)}
        pairs = list(enumerate(zip(optimizers, self._trained, strict=True)))
        added = {
            str(number): [trained.names(group["params"]) for group in optimizer.param_groups[trained.groups :]]
            for number, (optimizer, trained) in pairs
            if len(optimizer.param_groups) > trained.groups
        }
        moved = {str(n): names for n, (one, trained) in pairs if (names := trained.moved(one)) is not None}
        return {**states, **({"added": added} if added else {}), **({"moved": moved} if moved else {})}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Give every optimizer its state back, and first the parameters that training gave it."""
        parameters = dict(self._module.named_parameters())
        for number, (optimizer, trained) in enumerate(zip(self._optimizers, self._trained, strict=True)):
            if (moved := state_dict.get("moved", {}).get(str(number))) is not None:
                trained.move(optimizer, moved)
            added = state_dict.get("added", {}).get(str(number), [])
            state = state_dict[str(number)]
            for names in added[max(0, len(optimizer.param_groups) - trained.groups) :]:
                given: list[Any] = [parameters[name] for name in names]
                if own := state["param_groups"][len(optimizer.param_groups)].get("param_names"):
                    given = [*zip(own, given, strict=True)]
                optimizer.add_param_group({"params": given})
            _load(optimizer, state)


def _saved(number: int, optimizer: Optimizer) -> dict[str, Any]:
    try:
        return optimizer.state_dict()
    except KeyError as error:
        groups = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        lost = [tuple(p.shape) for p in optimizer.state if id(p) not in groups]
        if not lost:
            raise
        raise UserError(
            f"optimizer {number} ({type(optimizer).__name__}) has state of a parameter of shape {lost[0]} that is in "
            "none of its groups any more, which its state_dict cannot say. Where a parameter is taken from a group, "
            "take its state too: del optimizer.state[parameter]."
        ) from error


def _load(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Give `optimizer` its state back, in the types it has: torch casts it to those of the weights.

    Tensors among its options, such as a learning rate, are on the devices where they were built.
    """
    built = [{k: v.device for k, v in group.items() if isinstance(v, Tensor)} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, devices in zip(optimizer.param_groups, built, strict=False):  # a wrapper may have more
        group.update({k: group[k].to(device) for k, device in devices.items() if isinstance(group.get(k), Tensor)})
    if not {"state", "param_groups"} <= state.keys():  # that of one that wraps another has a form of its own
        return
    numbers = itertools.chain.from_iterable(group["params"] for group in state["param_groups"])
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(numbers, parameters, strict=False):
        if number in state["state"] and parameter in optimizer.state:  # one that wraps another may keep it there
            optimizer.state[parameter] = _uncast(state["state"][number], optimizer.state[parameter])


def _uncast(saved: Any, loaded: Any) -> Any:
    """Return `loaded` where it has the types of `saved`, and elsewhere what was saved, on the device it belongs to."""
    if isinstance(saved, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if type(saved) is dict and isinstance(loaded, dict):
        return {key: _uncast(value, loaded.get(key)) for key, value in saved.items()}
    if type(saved) in (list, tuple) and len(saved) == len(loaded):
        return type(saved)(map(_uncast, saved, loaded))
    return copy.deepcopy(saved)


def scheduler_objects(scheduler: Any) -> dict[str, Any]:
    """Return the attributes of `scheduler` that its `state_dict`, which is torch's, holds and that cannot be written.

    They are objects: another scheduler that comes after it, a random generator, a function.
    """
    if getattr(type(scheduler), "state_dict", None) is not LRScheduler.state_dict:
        return {}
    return {name: value for name, value in scheduler.state_dict().items() if not _is_writable(value)}


def _is_writable(value: Any) -> bool:
    try:
        encode_lazily(value)
    except UnsupportedState:
        return False
    return True


def _state_of(scheduler: Any) -> dict[str, Any]:
    objects = scheduler_objects(scheduler)
    return {name: value for name, value in scheduler.state_dict().items() if name not in objects}


class SchedulerList(AlikeOnRanks):
    """All schedulers as one part of a run's state."""

    description = "what a scheduler keeps"

    def __init__(self, schedulers: list[SchedulerConfig]) -> None:
        self._schedulers = schedulers

    def state_dict(self) -> dict[str, Any]:
        """Return every scheduler's state, by number."""
        return {str(number): _state_of(config.scheduler) for number, config in enumerate(self._schedulers)}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Give every scheduler its state back."""
        for number, config in enumerate(self._schedulers):
            config.scheduler.load_state_dict(copy.deepcopy(state_dict[str(number)]))  # some take entries out of it


def read_optimizers(returned: Any, module: nn.Module) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Return the optimizers and schedulers in what `configure_optimizers` returned.

    Raises:
        UserError: it is none of the shapes that are understood, or its parts do not belong together.
    """
    where = f"{type(module).__name__}.configure_optimizers"
    by_hand = not getattr(module, "automatic_optimization", True)
    found = ([], []) if returned is None and by_hand else _read(returned, where)
    if found is None or not (found[0] or by_hand):
        raise UserError(
            f"{where} returned {_describe(returned)}; an optimizer, a list of them, ([optimizers], [schedulers]), or "
            '{"optimizer": ..., "lr_scheduler": ...} is needed. A module that changes its weights without one sets '
            "self.automatic_optimization = False, and returns None."
        )
    optimizers, schedulers = found
    if not by_hand:
        _check_schedulers(optimizers, schedulers, where)
    return optimizers, schedulers


def _check_schedulers(optimizers: list[Optimizer], schedulers: list[SchedulerConfig], where: str) -> None:
    """Refuse schedulers that the engine would step in vain."""
    groups = {id(group) for optimizer in optimizers for group in optimizer.param_groups}
    for config in schedulers:
        name, of = type(config.scheduler).__name__, getattr(config.scheduler, "optimizer", None)
        if isinstance(of, Optimizer) and not any(id(group) in groups for group in of.param_groups):
            raise UserError(
                f"{where} returned a {name} of an optimizer that it did not return: it would change the learning rate "
                "of nothing that is stepped. Build the scheduler with the optimizer that is returned."
            )
        if config.reduce_on_plateau and config.monitor is None:
            raise UserError(
                f"{where} returned a {name} that watches nothing: say which logged value, as in "
                '{"scheduler": ..., "monitor": "val/loss"}.'
            )


def _read(returned: Any, where: str) -> tuple[list[Optimizer], list[SchedulerConfig]] | None:
    if isinstance(returned, Optimizer):
        return [returned], []
    if isinstance(returned, dict) and isinstance(returned.get("optimizer"), Optimizer):
        if unknown := set(returned) - {"optimizer", "lr_scheduler", "monitor"}:
            raise UserError(f"{where} returned the keys {sorted(unknown)}; there are: lr_scheduler, monitor, optimizer")
        schedulers = (
            [_scheduler(returned["lr_scheduler"], returned.get("monitor"))] if "lr_scheduler" in returned else []
        )
        return [returned["optimizer"]], schedulers
    if not isinstance(returned, (list, tuple)):
        return None
    if all(isinstance(entry, Optimizer) for entry in returned):
        return list(returned), []
    if all(isinstance(entry, dict) for entry in returned):
        pairs = [_read(entry, where) for entry in returned]
        return None if None in pairs else ([o for p in pairs if p for o in p[0]], [s for p in pairs if p for s in p[1]])
    if len(returned) == 2 and all(isinstance(entry, (list, tuple)) for entry in returned):
        optimizers, schedulers = list(returned[0]), [_scheduler(entry) for entry in returned[1]]
        return (optimizers, schedulers) if all(isinstance(o, Optimizer) for o in optimizers) else None
    return None


def _describe(returned: Any) -> str:
    """Say what a value is made of."""
    if isinstance(returned, (list, tuple)):
        inner = ", ".join(map(_describe, returned))
        return f"[{inner}]" if isinstance(returned, list) else f"({inner})"
    if isinstance(returned, dict):
        return "{" + ", ".join(f"{key!r}: {_describe(value)}" for key, value in returned.items()) + "}"
    return "None" if returned is None else type(returned).__name__


def lazy_tensors(module: nn.Module) -> str:
    """Return text on which parameters and buffers of `module` have no shape yet; empty if all have one."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    if not lazy:
        return ""
    return (
        f"{format_names(lazy, 3)} of {type(module).__name__} have no shape yet: a lazy module gets it from its first "
        "input, and the optimizers, which come before, need it. Do one forward pass on an input of zeros at the end of "
        "__init__ or in setup: with torch.no_grad(): self(torch.zeros(2, ...)); put normalising layers into "
        "eval() for it, as they count what they see."
    )


def _scheduler(entry: Any, monitor: str | None = None) -> SchedulerConfig:
    entry = entry if isinstance(entry, dict) else {"scheduler": entry}
    known = {field.name for field in fields(SchedulerConfig)}
    if unknown := set(entry) - known:
        raise UserError(f"lr_scheduler has the keys {sorted(unknown)}; there are: {', '.join(sorted(known))}")
    scheduler = entry.get("scheduler")
    if isinstance(scheduler, Optimizer) or not (hasattr(scheduler, "step") and hasattr(scheduler, "state_dict")):
        raise UserError(f"lr_scheduler is {_describe(entry)}; a scheduler of torch.optim.lr_scheduler is needed.")
    if entry.get("interval", "epoch") not in ("epoch", "step"):
        raise UserError(f"lr_scheduler has interval {entry['interval']!r}; there are: epoch, step")
    frequency = entry.get("frequency", 1)
    if type(frequency) is not int or frequency < 1:
        raise UserError(
            f"lr_scheduler has frequency {frequency!r}; a whole number of epochs or steps is needed, from 1"
        )
    watches = isinstance(scheduler, ReduceLROnPlateau)
    chosen: dict[str, Any] = {"monitor": monitor, "reduce_on_plateau": watches, **entry}
    return SchedulerConfig(**chosen)
