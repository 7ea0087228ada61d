"""A module's non-persistent buffers, train or eval modes, and frozen parameters."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from midstride.engine.metrics.torchmetrics_state import is_metric
from midstride.engine.modules.layers import owner_of
from midstride.engine.modules.torch_internals import buffers_of, transient_buffers
from midstride.engine.state.module_index import Members, ModuleIndex
from midstride.engine.state.stateful import AlikeOnRanks
from midstride.engine.state.tensors import is_expanded

__all__ = ["NonPersistentBuffers", "TrainingModes"]

log = logging.getLogger(__name__)


class NonPersistentBuffers(AlikeOnRanks):
    """Buffers with `persistent=False`, which `Module.state_dict` omits and training can change."""

    description = "a buffer that is not persistent"

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device, self._index = module, device, ModuleIndex.of(module)
        self._built = frozenset(self._filled(self._index.now()))

    def state_dict(self) -> dict[str, Any]:
        """Return the buffers by name; None for one set to None or deleted in an existing layer."""
        members = self._index.now()
        filled = self._filled(members)
        lost = self._built - filled.keys()
        # Some of them are persistent now, or their layers were removed.
        gone = [where for where in sorted(lost) if where not in members.buffers and owner_of(where) in members.modules]
        return {**filled, **dict.fromkeys(gone)}

    def _filled(self, members: Members) -> dict[str, Any]:
        return {
            f"{path}.{name}" if path else name: buffers_of(module)[name]
            for path, module in members.modules.items()
            if transient_buffers(module) and not is_metric(module)  # TorchmetricsState has those
            for name in sorted(transient_buffers(module))
            if buffers_of(module).get(name) is not None
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the buffers, in place if shape and dtype match, as other objects can hold them.

        Others are registered anew, such as caches that training registers or fills late.
        """
        members = self._index.now()
        filled, modules = self._filled(members), members.modules
        new = [where for where in filled if where in self._built and where not in state_dict]
        gone = [where for where in state_dict if owner_of(where) not in modules]
        _warn_of_code_changes("buffers", new, gone)
        state_dict.update({where: filled[where] for where in new})
        for where in gone:
            del state_dict[where]
        for where in {**filled, **state_dict}:
            path, _, name = where.rpartition(".")
            buffer, saved = filled.get(where), state_dict.get(where)
            if buffer is not None and saved is not None and _can_take(buffer, saved):
                buffer.detach().copy_(saved)
            else:
                value = None if saved is None else saved.to(self._device)
                self._module.get_submodule(path).register_buffer(name, value, persistent=False)


class TrainingModes(AlikeOnRanks):
    """Submodules in training mode, and parameters that collect gradients."""

    description = "what is in training"

    def __init__(self, module: nn.Module) -> None:
        self._module, self._index = module, ModuleIndex.of(module)
        #: the modes before the evaluation that is under way, which it ends with; None outside an evaluation
        self._before_evaluation: dict[str, bool] | None = None
        #: submodules that were in training mode within the evaluation of the loaded snapshot, until it is continued
        self._within: list[str] = []

    @contextmanager
    def evaluating(
        self, begin: Callable[[], object] | None = None, end: Callable[[], object] | None = None
    ) -> Iterator[None]:
        """Put the module into eval mode until the block ends. A snapshot holds the previous modes.

        Args:
            begin: sets the modes of the evaluation, in place of `eval()`.
            end: sets the modes afterwards, in place of the previous ones.
        """
        self._before_evaluation = self._training()
        (begin or self._module.eval)()
        self._set(dict.fromkeys(self._within, True))
        self._within = []
        try:
            yield
        finally:
            if end is None:
                self._set(self._before_evaluation)
            else:
                end()
            self._before_evaluation = None

    def _training(self) -> dict[str, bool]:
        return {name: module.training for name, module in self._index.now().modules.items()}

    def _set(self, training: dict[str, bool]) -> None:
        for name, module in self._module.named_modules():
            module.training = training.get(name, module.training)

    def state_dict(self) -> dict[str, Any]:
        """Return both by name; within an evaluation also submodules that are in training mode there."""
        members, before = self._index.now(), self._before_evaluation
        now = {name: module.training for name, module in members.modules.items()}
        within = self._within if before is None else [name for name, is_training in now.items() if is_training]
        return {
            "training": now if before is None else before,
            "requires_grad": {name: parameter.requires_grad for name, parameter in members.parameters.items()},
            **({"training within evaluation": within} if within else {}),
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore both; a submodule that is not in the snapshot stays as built."""
        training, built = state_dict["training"], self._training()
        new, gone = [name for name in built if name not in training], [name for name in training if name not in built]
        _warn_of_code_changes("submodules", new, gone)
        self._set(training)
        self._within = list(state_dict.get("training within evaluation", []))
        state_dict["training"] = self._training()
        for name, parameter in self._module.named_parameters():
            parameter.requires_grad_(state_dict["requires_grad"][name])


def _can_take(buffer: Tensor, saved: Tensor) -> bool:
    """Return whether the values of `saved` can be copied into `buffer` in place."""
    return not is_expanded(buffer) and (buffer.shape, buffer.dtype) == (saved.shape, saved.dtype)


def _warn_of_code_changes(what: str, new: Sequence[str], gone: Sequence[str]) -> None:
    """Warn of `new` and `gone` submodules or buffers, built by other code than the snapshot's."""
    lines = {"new, and as built": new, "gone, and dropped": gone}
    if said := [f"{line}: {', '.join(names)}" for line, names in lines.items() if names]:
        log.warning("the code builds other %s than those in the snapshot: %s", what, "; ".join(said))
