"""Wraps methods of users that Lightning calls with other arguments than the engine, so that they get Lightning's."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from torch import Tensor

from midstride.engine.errors import UserError
from midstride.engine.lightning.checkpoint import checkpoint_of
from midstride.engine.trees import convert

__all__ = ["wrap_hook"]

Method = Callable[..., Any]


def wrap_hook(kind: type, name: str) -> Method | None:
    """Return a wrapper of the method `name` of the user's class `kind`; None if it needs none.

    Raises:
        UserError: it is a step that takes the loader's iterator.
    """
    method = getattr(kind, name)
    if name in _STEPS:
        _ensure_no_iterator(kind, name)
        return _without_index(method) if _takes_batch_only(method) else None
    return _WRAPPERS[name](method) if name in _WRAPPERS else None


_STEPS = frozenset({"training_step", "validation_step", "test_step", "predict_step"})


def _ensure_no_iterator(kind: type, name: str) -> None:
    """Raise UserError for a step that takes `dataloader_iter`: no snapshot could hold what it has read ahead."""
    if "dataloader_iter" in inspect.signature(getattr(kind, name)).parameters:
        raise UserError(
            f"{kind.__name__}.{name} takes dataloader_iter, and a step is given a batch here: write "
            f"{name}(self, batch, batch_idx), or let several loaders give one batch (CombinedLoader)"
        )


def _takes_batch_only(step: Method) -> bool:
    """Return whether `self` and a batch are the only parameters of `step`; Lightning then passes no index."""
    parameters = inspect.signature(step).parameters.values()
    return len(parameters) == 2 and all(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters)


def _without_index(step: Method) -> Method:
    return wraps(step)(lambda self, batch, *_: step(self, batch))


def _wrap_train_batch_end(hook: Method) -> Method:
    """Pass the outputs of the step as Lightning does; `hook` is a module's or a callback's."""

    @wraps(hook)
    def called(self: Any, *given: Any) -> None:
        *before, outputs, batch, index = given
        trainer = before[0] if before else self.trainer
        hook(self, *before, _step_outputs(outputs, trainer.accumulate_grad_batches), batch, index)

    return called


def _step_outputs(outputs: Any, window: int) -> Any:
    """Return `outputs` as Lightning passes them: a dict, detached, with the loss divided by `window` batches."""
    found = {"loss": outputs} if isinstance(outputs, Tensor) else {} if outputs is None else outputs
    if not isinstance(found, Mapping):
        return found
    detached = convert({**found}, Tensor.detach)
    loss = detached.get("loss")
    return {**detached, "loss": loss / window} if window > 1 and isinstance(loss, Tensor) else detached


def _wrap_train_batch_start(hook: Method) -> Method:
    """Return what a module's hook returns, and None for a callback's, whose result Lightning ignores."""

    @wraps(hook)
    def called(self: Any, *given: Any) -> Any:
        returned, is_module = hook(self, *given), len(given) == 2
        return returned if is_module else None

    return called


def _wrap_save_checkpoint(hook: Method) -> Method:
    """Pass the checkpoint with Lightning's entries; only entries that the hook adds are kept."""

    @wraps(hook)
    def called(self: Any, *owners: Any) -> None:
        *before, checkpoint = owners
        entries = _lightning_entries(before[1] if before else self)
        extended = {**checkpoint, **entries}
        hook(self, *before, extended)
        checkpoint.update({key: value for key, value in extended.items() if key not in entries})

    return called


def _wrap_load_checkpoint(hook: Method) -> Method:
    """Pass the checkpoint with Lightning's entries; the weights of the module are restored by then."""

    @wraps(hook)
    def called(self: Any, *owners: Any) -> None:
        *before, checkpoint = owners
        hook(self, *before, {**checkpoint, **_lightning_entries(before[1] if before else self)})

    return called


def _lightning_entries(module: Any) -> dict[str, Any]:
    return checkpoint_of(module, module.state_dict())


_WRAPPERS: dict[str, Callable[[Method], Method]] = {
    "on_load_checkpoint": _wrap_load_checkpoint,
    "on_save_checkpoint": _wrap_save_checkpoint,
    "on_train_batch_end": _wrap_train_batch_end,
    "on_train_batch_start": _wrap_train_batch_start,
}
