"""State of callbacks, and of a DataModule with a `state_dict`, as a part of the run's state."""

import copy
import logging
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from midstride.engine.modules.monitors import Monitor
from midstride.engine.objects.kinds.tensors import mark_device_tensors, placed_tensors
from midstride.engine.state.stateful import AlikeOnRanks, Stateful
from midstride.engine.user_code import call_user_code

__all__ = ["Callbacks", "by_class_name"]

log = logging.getLogger(__name__)

T = TypeVar("T")


def by_class_name(owners: Sequence[T]) -> dict[str, T]:
    """Return callbacks by class name. The second callback of a class is `Name#1`."""
    named: dict[str, T] = {}
    for owner in owners:
        name = type(owner).__name__
        same = sum(1 for known in named if known.split("#")[0] == name)
        named[f"{name}#{same}" if same else name] = owner
    return named


class Callbacks(AlikeOnRanks):
    """The states of all callbacks of a Trainer, and of its DataModule, by class name.

    Args:
        owners: the callbacks and the DataModule.
        device: device of tensors that were on an accelerator.
    """

    description = "the state of a callback or of the DataModule"

    def __init__(self, owners: Sequence[Stateful], device: torch.device) -> None:
        self.by_name, self._device = by_class_name(owners), device

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each callback by name."""
        return {name: self._state_of(name) for name in self.by_name}

    def _state_of(self, name: str) -> Any:
        owner = self.by_name[name]
        return mark_device_tensors(call_user_code(f"{type(owner).__name__}.state_dict", owner.state_dict))

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load the state of each callback that is in `state_dict` and still monitors the same value.

        Other callbacks start over; states of callbacks that no longer exist are dropped.
        """
        for name in set(state_dict) - set(self.by_name):
            del state_dict[name]
        for name, callback in self.by_name.items():
            if name in state_dict and not _watches_another(callback, state_dict[name]):
                where = f"{type(callback).__name__}.load_state_dict"
                given = copy.deepcopy(state_dict[name], placed_tensors(state_dict[name], self._device))
                call_user_code(where, callback.load_state_dict, given)
            else:
                state_dict[name] = self._state_of(name)


def _watches_another(callback: Stateful, saved: dict[str, Any]) -> bool:
    """Return True, with a warning, if `saved` belongs to a `Monitor` of another value or mode.

    The state of a user's own monitor can lack the value's name; False then.
    """
    if not isinstance(callback, Monitor) or "monitor" not in saved or saved == saved | callback.watched:
        return False
    log.warning(
        "%s now watches %s (%s), but the snapshot has the best %s (%s): the search starts over",
        *(type(callback).__name__, callback.monitor, callback.mode, saved["monitor"], saved["mode"]),
    )
    return True
