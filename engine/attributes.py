"""What a user's module carries besides weights: plain attributes, and which parts of it train."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from midstride.engine.errors import UnsupportedState
from midstride.engine.snapshots.codec import encode

__all__ = ["Attributes", "Modes"]

log = logging.getLogger(__name__)
#: what the engine sets itself
_OURS = frozenset({"training", "hparams", "device"})


class Attributes:
    """The plain attributes of a module and of the user's own modules in it: counters, lists of outputs, schedules.

    What is of a type that cannot be written (a tokenizer, say) is named once in a warning; functions,
    which do not change, are not.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._named: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        """Return every attribute that can be written, by module and name."""
        state: dict[str, Any] = {}
        for path, module in self._own():
            for name, value in vars(module).items():
                if not name.startswith("_") and name not in _OURS and self._can_be_kept(path, name, value):
                    state.setdefault(path, {})[name] = value
        return state

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Set every attribute back; one that came up later than the snapshot is taken away."""
        for path, module in self._own():
            saved = state_dict.get(path, {})
            for name in set(self.state_dict().get(path, {})) - set(saved):
                delattr(module, name)
            for name, value in saved.items():
                setattr(module, name, value)

    def _own(self) -> Iterator[tuple[str, nn.Module]]:
        for path, module in self._module.named_modules():
            if type(module).__module__.partition(".")[0] not in ("torch", "torchmetrics"):
                yield path, module

    def _can_be_kept(self, path: str, name: str, value: Any) -> bool:
        if value is None or isinstance(value, (bool, int, float, str)):
            return True
        if callable(value):
            return False
        try:
            encode({name: value})
        except UnsupportedState:
            where = f"{path}.{name}" if path else name
            if where not in self._named:
                self._named.add(where)
                log.warning(
                    "the module's attribute %s, a %s, is not part of snapshots; if training changes it, keep it by "
                    "on_save_checkpoint and on_load_checkpoint",
                    where,
                    type(value).__name__,
                )
            return False
        return True


class Modes:
    """Which submodules are in training mode, and which parameters collect gradients."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._held: dict[str, bool] | None = None

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the module into evaluation, and back; a snapshot taken within holds what it goes back to."""
        self._held = self._training()
        self._module.eval()
        try:
            yield
        finally:
            self._set(self._held)
            self._held = None

    def _training(self) -> dict[str, bool]:
        return {name: module.training for name, module in self._module.named_modules()}

    def _set(self, training: dict[str, bool]) -> None:
        for name, module in self._module.named_modules():
            module.training = training[name]

    def state_dict(self) -> dict[str, Any]:
        """Return both, by name."""
        return {
            "training": self._training() if self._held is None else self._held,
            "requires_grad": {name: parameter.requires_grad for name, parameter in self._module.named_parameters()},
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take both back."""
        self._set(state_dict["training"])
        for name, parameter in self._module.named_parameters():
            parameter.requires_grad_(state_dict["requires_grad"][name])
