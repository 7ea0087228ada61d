"""Finds hooks that change the module for a validation, such as weight averaging.

The weights that such a hook puts back afterwards are often in no state. A run that resumed within the validation would
train on from the averages, so no snapshot is taken there. Content is compared, not versions: many callbacks write by
`parameter.data.copy_`, which no version counts.
"""

import time
from typing import Any

from torch import Tensor, nn

from midstride.engine.modules.torch_internals import buffers_of, parameters_of
from midstride.engine.state.row_shards import is_distributed
from midstride.engine.state.tensor_digest import tensor_digest
from midstride.engine.strategies.mixins import ModelParallel
from midstride.engine.strategies.torch_internals import version_of
from midstride.engine.training.context import EvaluationContext

__all__ = ["ValidationChanges"]

_HOOKS_OF_START = ("on_validation_start", "on_validation_epoch_start")
_HOOKS_OF_BATCHES = ("on_validation_batch_start", "on_validation_batch_end")
#: bytes of a tensor on an accelerator beyond which only some elements are compared
_SAMPLE_BYTES = 1 << 20


class ValidationChanges:
    """Allows snapshots anywhere but in a validation whose hooks have changed the module.

    A validation without hooks costs nothing; one with hooks two readings of the weights.

    Args:
        context: context of the fit.
    """

    def __init__(self, context: EvaluationContext) -> None:
        self._context, hooks = context, context.hooks
        self._has_start_hooks = any(map(hooks.has, _HOOKS_OF_START))
        # Between steps of a validation, weights of a model-parallel strategy may be gathered or not.
        is_readable = not isinstance(context.strategy, ModelParallel)
        self._has_batch_hooks = is_readable and any(map(hooks.has, _HOOKS_OF_BATCHES))
        self._before: dict[str, Any] | None = None
        self._has_changed = False
        self._began, self._first_boundary = 0.0, 0
        #: boundaries and seconds of the newest validation in which hooks changed the module; None before the first
        self.newest: tuple[int, float] | None = None

    def begin(self) -> None:
        """Note the module, which is in eval mode, before the first hooks of a validation."""
        self._has_changed = False
        self._began, self._first_boundary = time.monotonic(), self._context.progress.after
        self._before = _content(self._context.module) if self._has_start_hooks or self._has_batch_hooks else None

    def compare_after_start_hooks(self) -> None:
        """Compare the module after the first hooks of a validation; every rank calls this."""
        if self._has_start_hooks:
            self._compare()

    def allow_snapshot(self) -> bool:
        """Return whether this state is the run's; every rank calls this at the same boundary."""
        if self._has_batch_hooks and self._context.progress.validating and not self._has_changed:
            if self._before is None:  # resumed within a validation
                self._before = _content(self._context.module)
            self._compare()
        return not self._has_changed

    def end(self) -> None:
        """Note that the validation and its hooks are over."""
        if self._has_changed:
            self.newest = self._context.progress.after - self._first_boundary, time.monotonic() - self._began
        self._has_changed, self._before = False, None

    def _compare(self) -> None:
        has_changed = _content(self._context.module) != self._before
        self._has_changed = any(self._context.collective.gather(has_changed))


def _content(module: nn.Module) -> dict[str, Any]:
    """Return layers, training modes and content of `module` by name."""
    content: dict[str, Any] = {}
    for path, layer in module.named_modules():
        content[path] = id(layer), layer.training
        for kind in (parameters_of(layer), buffers_of(layer)):
            content |= {f"{path}.{name}": _of_tensor(one) for name, one in kind.items() if one is not None}
    return content


def _of_tensor(tensor: Tensor) -> tuple[Any, ...]:
    own = tensor.to_local() if is_distributed(tensor) else tensor
    if own.is_cpu and type(own) in (Tensor, nn.Parameter):
        return id(tensor), tensor_digest(own)
    return id(tensor), tensor_digest(own, _SAMPLE_BYTES), None if own.is_inference() else version_of(own)
