"""What a user's module carries besides weights and attributes: other buffers, and which parts of it train."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from midstride.engine.metrics.torchmetrics_state import is_metric
from midstride.engine.modules.layers import owner_of
from midstride.engine.modules.torch_internals import buffers_of, transient_buffers
from midstride.engine.state.stateful import AlikeOnRanks
from midstride.engine.state.tensors import is_expanded

if TYPE_CHECKING:
    from midstride.engine.modules.module import TrainingModule

__all__ = ["NonPersistentBuffers", "TrainingModes"]

log = logging.getLogger(__name__)


class NonPersistentBuffers(AlikeOnRanks):
    """The buffers of a module that its own state leaves out (`persistent=False`): training may change those too."""

    in_words = "a buffer that is not persistent"

    def __init__(self, module: "TrainingModule") -> None:
        self._module = module
        self._built = frozenset(self._filled())

    def state_dict(self) -> dict[str, Any]:
        """Return those that are filled, by name, and None for those that training emptied, in layers there are."""
        filled, modules = self._filled(), dict(self._module.named_modules())
        other = {where for where in self._built if owner_of(where) not in modules}  # gone with their layers
        other.update(name for name, _ in self._module.named_buffers())  # or persistent by now
        return {**filled, **dict.fromkeys(sorted(self._built - filled.keys() - other))}

    def _filled(self) -> dict[str, Any]:
        return {
            f"{path}.{name}" if path else name: buffers_of(module)[name]
            for path, module in self._module.named_modules()
            if not is_metric(module)  # those are kept by the strategy
            for name in sorted(transient_buffers(module))
            if buffers_of(module).get(name) is not None
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Put them back, in place where they have the form they had: others may hold them too.

        Some come up in training, as caches do: filled later than they are registered, or registered later.
        """
        filled, modules = self._filled(), dict(self._module.named_modules())
        new = [where for where in filled if where in self._built and where not in state_dict]
        gone = [where for where in state_dict if owner_of(where) not in modules]
        _tell("buffers", new, gone)
        state_dict.update({where: filled[where] for where in new})
        for where in gone:
            del state_dict[where]
        for where in {**filled, **state_dict}:
            path, _, name = where.rpartition(".")
            buffer, saved = filled.get(where), state_dict.get(where)
            if buffer is not None and saved is not None and _can_take(buffer, saved):
                buffer.detach().copy_(saved)
            else:
                value = None if saved is None else saved.to(self._module.device)
                self._module.get_submodule(path).register_buffer(name, value, persistent=False)


class TrainingModes(AlikeOnRanks):
    """Which submodules are in training mode, and which parameters collect gradients."""

    in_words = "what is in training"

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._held: dict[str, bool] | None = None
        #: submodules that were put into training mode within the evaluation that a snapshot is of, until it goes on
        self._within: list[str] = []

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the module into evaluation, and back; a snapshot taken within holds what it goes back to."""
        self._held = self._training()
        self._module.eval()
        self._set(dict.fromkeys(self._within, True))
        self._within = []
        try:
            yield
        finally:
            self._set(self._held)
            self._held = None

    def _training(self) -> dict[str, bool]:
        return {name: module.training for name, module in self._module.named_modules()}

    def _set(self, training: dict[str, bool]) -> None:
        for name, module in self._module.named_modules():
            module.training = training.get(name, module.training)

    def state_dict(self) -> dict[str, Any]:
        """Return both, by name; within an evaluation also what is in training mode there, if anything is."""
        now = self._training()
        within = self._within if self._held is None else [name for name, is_training in now.items() if is_training]
        return {
            "training": now if self._held is None else self._held,
            "requires_grad": {name: parameter.requires_grad for name, parameter in self._module.named_parameters()},
            **({"training within evaluation": within} if within else {}),
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take both back; a submodule that the code builds since is as built."""
        training, built = state_dict["training"], self._training()
        new, gone = [name for name in built if name not in training], [name for name in training if name not in built]
        _tell("submodules", new, gone)
        self._set(training)
        self._within = list(state_dict.get("training within evaluation", []))
        state_dict["training"] = self._training()
        for name, parameter in self._module.named_parameters():
            parameter.requires_grad_(state_dict["requires_grad"][name])


def _can_take(buffer: Tensor, saved: Tensor) -> bool:
    """Return whether the values of `saved` can be put into `buffer`."""
    return not is_expanded(buffer) and (buffer.shape, buffer.dtype) == (saved.shape, saved.dtype)


def _tell(what: str, new: Sequence[str], gone: Sequence[str]) -> None:
    """Say what the code builds otherwise than that of the snapshot's attempt."""
    lines = {"new, and as built": new, "gone, and dropped": gone}
    if said := [f"{line}: {', '.join(names)}" for line, names in lines.items() if names]:
        log.warning("the code builds other %s than those the snapshot is of: %s", what, "; ".join(said))
