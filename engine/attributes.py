"""What a user's module carries besides weights: plain attributes, and which parts of it train."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from midstride.engine.data.held import Generator, get_state, set_state
from midstride.engine.elastic import of_first
from midstride.engine.errors import UnsupportedState
from midstride.engine.metrics import is_metric
from midstride.engine.snapshots.codec import walk

if TYPE_CHECKING:
    from midstride.engine.module import TrainingModule

__all__ = ["Attributes", "Buffers", "Modes", "OwnGenerators"]

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
        for path, module in _users_own(self._module):
            for name, value in vars(module).items():
                if not name.startswith("_") and name not in _OURS and self._can_be_kept(path, name, value):
                    state.setdefault(path, {})[name] = value
        return state

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Set every attribute back; one that came up later than the snapshot is taken away."""
        for path, module in _users_own(self._module):
            saved = state_dict.get(path, {})
            for name in set(self.state_dict().get(path, {})) - set(saved):
                delattr(module, name)
            for name, value in saved.items():
                setattr(module, name, value)

    def resharded(self, states: Sequence[dict[str, Any]], rank: int) -> dict[str, Any]:
        """Return rank 0's, with a warning where others differ."""
        return dict(of_first("an attribute of the module", states))

    def _can_be_kept(self, path: str, name: str, value: Any) -> bool:
        if value is None or isinstance(value, (bool, int, float, str)):
            return True
        if callable(value) or isinstance(value, Generator):
            return False
        try:
            walk({name: value})
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


class Buffers:
    """The buffers of a module that its own state leaves out (`persistent=False`): training may change those too."""

    def __init__(self, module: "TrainingModule") -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        """Return those that are filled, by name."""
        return {
            f"{path}.{name}" if path else name: module._buffers[name]
            for path, module in self._module.named_modules()
            if not is_metric(module)  # those are kept by the strategy
            for name in sorted(module._non_persistent_buffers_set)
            if module._buffers.get(name) is not None
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Put them back, in place where they have the form they had: others may hold them too.

        Some come up in training, as caches do: filled later than they are registered, or registered later.
        """
        held = self.state_dict()
        for where in {**held, **state_dict}:
            path, _, name = where.rpartition(".")
            buffer, saved = held.get(where), state_dict.get(where)
            if buffer is not None and saved is not None and (buffer.shape, buffer.dtype) == (saved.shape, saved.dtype):
                buffer.detach().copy_(saved)
            else:
                value = None if saved is None else saved.to(self._module.device)
                self._module.get_submodule(path).register_buffer(name, value, persistent=False)

    def resharded(self, states: Sequence[dict[str, Any]], rank: int) -> dict[str, Any]:
        """Return rank 0's, with a warning where others differ."""
        return dict(of_first("a buffer that is not persistent", states))


class OwnGenerators:
    """The random generators that a module and the user's own modules in it hold as attributes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def _held(self) -> dict[str, Generator]:
        own = _users_own(self._module)
        return {
            f"{path}.{name}" if path else name: value
            for path, module in own
            for name, value in vars(module).items()
            if isinstance(value, Generator)
        }

    def state_dict(self) -> dict[str, Any]:
        """Return every generator's state, by its path."""
        return {name: get_state(generator) for name, generator in self._held().items()}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Put every generator back."""
        for name, generator in self._held().items():
            set_state(generator, state_dict[name])

    def resharded(self, states: Sequence[dict[str, Any]], rank: int) -> dict[str, Any]:
        """Return rank 0's, with a warning where others differ."""
        return dict(of_first("a generator of the module", states))


def _users_own(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in `module` that a library did not write, by path."""
    for path, part in module.named_modules():
        if type(part).__module__.partition(".")[0] not in ("torch", "torchmetrics") and not is_metric(part):
            yield path, part


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
