"""Settings of optimizers and schedulers that a snapshot overrides, and warnings about them.

A snapshot restores optimizers and schedulers with their settings, such as learning rates. So the settings that
this attempt makes are compared with those at the start of the run, with a warning if they have no effect.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from midstride.engine.checkpointing.identity import identity_changes, identity_of, is_json
from midstride.engine.errors import IdentityChanged
from midstride.engine.optim.schedulers import SchedulerConfig

__all__ = ["Settings"]

#: keys of parameter groups that are no settings
_NOT_SETTINGS = ("params", "param_names", "initial_lr")
#: largest number of parameter groups of one optimizer that are compared
_MAX_GROUPS = 32
_PLAIN = (bool, int, float, str)


class Settings:
    """The settings of this attempt before a snapshot is restored, and those in force afterwards.

    Args:
        module: the module, before anything is restored.
        optimizers: optimizers, as this attempt makes them.
        schedulers: schedulers, likewise.
        maker: what makes them, for messages: a subject and its verb.
        place: where a setting can be set again, for messages.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[SchedulerConfig],
        *,
        maker: str = "configure_optimizers returned",
        place: str = "in a hook such as on_train_epoch_start",
    ) -> None:
        self._module, self._optimizers, self._schedulers = module, optimizers, schedulers
        self._maker, self._place = maker, place
        self._kinds = [type(o).__name__ for o in optimizers]
        self._kinds += [type(config.scheduler).__name__ for config in schedulers]
        self._asked = _configured(optimizers, schedulers)
        self._attributes = _attributes(module)
        self._began_with: dict[str, Any] = dict(self._asked)
        self._overridden: dict[str, dict[str, Any]] = {}

    def check(self, saved: Mapping[str, Any], where: str) -> None:
        """Check that optimizers and schedulers have the classes that they have in the snapshot.

        Raises:
            IdentityChanged: they have not; the message names both.
        """
        before, now = saved.get("kinds", self._kinds), self._kinds
        if before != now:
            raise IdentityChanged(
                f"{where} has the state of {_listed(before)}, and {self._maker} {_listed(now)}: start "
                "the run with those it had, or start over under another run name."
            )

    def compare(self, saved: Mapping[str, Any], running: Mapping[str, Any]) -> list[str]:
        """Return warnings on settings that differ from those at the start of the run; called after the restore.

        Args:
            saved: facts of the snapshot.
            running: facts of this attempt.
        """
        before = saved.get("settings", {})
        in_force = _configured(self._optimizers, self._schedulers)
        lines = [
            f"{key} differs, as accepted: {values}"
            for key, values in identity_changes(saved["identity"], running["identity"]).items()
        ]
        for name, value in self._asked.items():
            if before.get(name, value) != value:
                lines.append(self._warning(name, value, in_force.get(name)))
        attributes = _attributes(self._module)
        new = _changed_arguments(saved["identity"], running["identity"])
        new += [setting["asked"] for setting in saved.get("overridden", {}).values()]
        for name, value in self._attributes.items():
            if attributes.get(name, value) != value and value in new:
                lines.append(self._warning(f"the module's {name}", value, attributes[name]))
        self._began_with = {**self._asked, **before}
        if self._overridden:
            lines.append(
                f"to train on with what is asked for now: set it {self._place}, or start another run, with the weights "
                "of this one"
            )
        return lines

    def _warning(self, name: str, asked: Any, in_force: Any) -> str:
        if in_force == asked:
            return f"{name} is {asked!r} now, and takes effect"
        self._overridden[name] = {"asked": asked, "in_force": in_force}
        return f"{name} is asked to be {asked!r} now, and stays {in_force!r}: the snapshot brings it along"

    def facts(self) -> dict[str, Any]:
        """Return the settings at the start of the run, those in force, and those that the snapshot overrides."""
        return {
            "kinds": self._kinds,
            "settings": self._began_with,
            "in_force": _configured(self._optimizers, self._schedulers),
            **({"overridden": self._overridden} if self._overridden else {}),
        }


def _configured(optimizers: Sequence[Optimizer], schedulers: Sequence[SchedulerConfig]) -> dict[str, Any]:
    """Return the settings of optimizers and schedulers as JSON values, by names such as "SGD, group 1: lr"."""
    settings: dict[str, Any] = {}
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups[:_MAX_GROUPS]):
            where = f"{type(optimizer).__name__}" + (f" {number}" if len(optimizers) > 1 else "")
            where += f", group {index}" if len(optimizer.param_groups) > 1 else ""
            settings |= {f"{where}: {key}": _plain(group[key]) for key in group if key not in _NOT_SETTINGS}
    for number, config in enumerate(schedulers):
        where = f"{type(config.scheduler).__name__}" + (f" {number}" if len(schedulers) > 1 else "")
        state = vars(config.scheduler)
        settings |= {f"{where}: {key}": _plain(state[key]) for key in state if _is_setting(key, state[key])}
    return settings


def _is_setting(key: str, value: Any) -> bool:
    """Return whether an attribute of a scheduler is a setting: public, and a plain value or a short container."""
    return not key.startswith("_") and (type(value) in _PLAIN or (isinstance(value, (list, dict)) and len(value) <= 16))


def _listed(kinds: list[str]) -> str:
    return ", ".join(kinds) or "none"


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else identity_of(value)
    return value if is_json(value) else str(value)  # such as inf, the initial `best` of ReduceLROnPlateau


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of the module and its submodules whose values are numbers or strings, by path."""
    return {
        f"{path}.{name}" if path else name: value
        for path, submodule in module.named_modules()
        for name, value in vars(submodule).items()
        if type(value) in _PLAIN and name != "training" and not name.startswith("_")
    }


def _changed_arguments(saved: Mapping[str, Any], running: Mapping[str, Any]) -> list[Any]:
    """Return the values of arguments of the module in `running` that differ in `saved`."""
    before, now = saved.get("module_args"), running.get("module_args")
    if not isinstance(before, dict) or not isinstance(now, dict):
        return []
    return [value for key, value in now.items() if before.get(key) != value and type(value) in _PLAIN]
