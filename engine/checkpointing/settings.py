"""Settings that a snapshot overrides, and warnings about them.

A snapshot restores optimizers and schedulers with their settings, such as learning rates. So the settings that
this attempt makes are compared with those at the start of the run, with a warning if they have no effect, unless they
are accepted: then they are set. `objects/changes.py` does the same for attributes.
"""

import ast
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from midstride.engine.checkpointing.identity import identity_changes, identity_of, is_json
from midstride.engine.errors import IdentityChanged
from midstride.engine.formatting import format_value
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
        optimizers: optimizers, as this attempt makes them, before anything is restored.
        schedulers: schedulers, likewise.
        maker: subject and verb for messages, such as "configure_optimizers returned".
        place: where a setting can be set again, for messages.
        is_accepted: whether settings that differ are taken from this attempt.
        attributes: returns, after the restore, path -> texts of the value in force and of the value asked for, of each
            attribute that has no effect.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[SchedulerConfig],
        *,
        maker: str = "configure_optimizers returned",
        place: str = "in a hook such as on_train_epoch_start",
        is_accepted: bool = False,
        attributes: Callable[[], Mapping[str, tuple[str, str]]] = dict,
    ) -> None:
        self._optimizers, self._schedulers = optimizers, schedulers
        self._maker, self._place, self._is_accepted, self._attributes = maker, place, is_accepted, attributes
        self._kinds = [type(o).__name__ for o in optimizers]
        self._kinds += [type(config.scheduler).__name__ for config in schedulers]
        self._asked = _configured(optimizers, schedulers)
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
        """Return warnings on settings that differ from the run's start; called after the restore.

        Args:
            saved: facts of the snapshot.
            running: facts of this attempt.
        """
        before = saved.get("settings", {})
        changed = [name for name, value in self._asked.items() if before.get(name, value) != value]
        if self._is_accepted:
            self._set({name: (before[name], self._asked[name]) for name in changed})
        in_force = _configured(self._optimizers, self._schedulers)
        lines = [
            f"{key} differs, as accepted: {values}"
            for key, values in identity_changes(saved["identity"], running["identity"]).items()
        ]
        lines += [self._warning(name, self._asked[name], in_force.get(name)) for name in changed]
        self._began_with = self._asked if self._is_accepted else {**self._asked, **before}
        if self._overridden:
            lines.append(
                f"to train with the new values: set them {self._place}, accept them by --accept-change settings "
                "(accept_change='settings' in a script), or start another run, with the weights of this one"
            )
        attributes = self._attributes().items()  # which are named where they are restored
        self._overridden |= {path: {"asked": _read(asked), "in_force": _read(now)} for path, (now, asked) in attributes}
        return lines

    def _set(self, changed: Mapping[str, tuple[Any, Any]]) -> None:
        """Set the settings in `changed`, each from its value at the start of the run to the new one."""
        for name, options, key in list(_options(self._optimizers, self._schedulers)):
            if name in changed:
                options[key] = _moved(options[key], *changed[name])
                if key == "lr" and "initial_lr" in options:
                    options["initial_lr"] = _moved(options["initial_lr"], *changed[name])

    def _warning(self, name: str, asked: Any, in_force: Any) -> str:
        if in_force == asked or self._is_accepted:
            return f"{name} is {format_value(name, in_force)} now, and takes effect"
        self._overridden[name] = {"asked": asked, "in_force": in_force}
        values = f"{format_value(name, asked)} now, and stays {format_value(name, in_force)}"
        return f"{name} is asked to be {values}: the snapshot's value is used"

    def facts(self) -> dict[str, Any]:
        """Return settings at the start of the run, those in force, and those overridden."""
        return {
            "kinds": self._kinds,
            "settings": self._began_with,
            "in_force": _configured(self._optimizers, self._schedulers),
            **({"overridden": self._overridden} if self._overridden else {}),
        }


def _configured(optimizers: Sequence[Optimizer], schedulers: Sequence[SchedulerConfig]) -> dict[str, Any]:
    """Return settings of optimizers and schedulers as JSON values, such as "SGD, group 1: lr"."""
    return {name: _plain(options[key]) for name, options, key in _options(optimizers, schedulers)}


def _options(
    optimizers: Sequence[Optimizer], schedulers: Sequence[SchedulerConfig]
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the name of each setting, the dict that has it, and its key there."""
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups[:_MAX_GROUPS]):
            where = f"{type(optimizer).__name__}" + (f" {number}" if len(optimizers) > 1 else "")
            where += f", group {index}" if len(optimizer.param_groups) > 1 else ""
            yield from ((f"{where}: {key}", group, key) for key in group if key not in _NOT_SETTINGS)
    for number, config in enumerate(schedulers):
        where = f"{type(config.scheduler).__name__}" + (f" {number}" if len(schedulers) > 1 else "")
        state = vars(config.scheduler)
        yield from ((f"{where}: {key}", state, key) for key in state if _is_setting(key, state[key]))


def _read(text: str) -> Any:
    """Return the number or text whose `repr` is `text`, else `text` itself."""
    with suppress(ValueError, SyntaxError):
        value = ast.literal_eval(text)
        return value if is_json(value) else text
    return text


def _moved(now: Any, was: Any, asked: Any) -> Any:
    """Return the new value of a setting that began as `was` and is `now`, moved in proportion."""
    if isinstance(now, Tensor):
        return now.copy_(_moved(now.item(), was, asked))
    if _plain(now) == was:
        return tuple(asked) if isinstance(now, tuple) else asked
    is_moved = all(type(value) in (int, float) for value in (now, was, asked)) and was
    return now * asked / was if is_moved else now


def _is_setting(key: str, value: Any) -> bool:
    """Return whether a scheduler's attribute is a setting: public, plain or a short container."""
    return not key.startswith("_") and (type(value) in _PLAIN or (isinstance(value, (list, dict)) and len(value) <= 16))


def _listed(kinds: list[str]) -> str:
    return ", ".join(kinds) or "none"


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else identity_of(value)
    return value if is_json(value) else str(value)  # such as inf, the initial `best` of ReduceLROnPlateau
