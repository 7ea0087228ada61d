"""Methods of a user's that Lightning calls with something else than the engine does: wrapped, so that they get that."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from torch import Tensor

from midstride.engine.errors import UserError
from midstride.engine.lightning.checkpoint import checkpoint_of
from midstride.engine.trees import convert

__all__ = ["wrapped"]

Method = Callable[..., Any]


def wrapped(kind: type, name: str) -> Method | None:
    """Return what is called in place of the method `name` of the user's class `kind`; None for that itself."""
    method = getattr(kind, name)
    if name in _STEPS:
        _ensure_no_iterator(kind, name)
        return _of_batch(method) if _takes_batch(method) else None
    return _WRAPPERS[name](method) if name in _WRAPPERS else None


_STEPS = frozenset({"training_step", "validation_step", "test_step", "predict_step"})


def _ensure_no_iterator(kind: type, name: str) -> None:
    """Refuse a step that Lightning hands the loader's iterator: what it reads ahead no snapshot could know."""
    if "dataloader_iter" in inspect.signature(getattr(kind, name)).parameters:
        raise UserError(
            f"{kind.__name__}.{name} takes dataloader_iter, and a step is given a batch here: write "
            f"{name}(self, batch, batch_idx), or let several loaders give one batch (CombinedLoader)"
        )


def _takes_batch(step: Method) -> bool:
    """Return whether `step` takes a batch and nothing else; Lightning then gives it nothing else."""
    taken = inspect.signature(step).parameters.values()
    return len(taken) == 2 and all(one.kind is one.POSITIONAL_OR_KEYWORD for one in taken)


def _of_batch(step: Method) -> Method:
    return wraps(step)(lambda self, batch, *_: step(self, batch))


def _with_loss(hook: Method) -> Method:
    """Give `on_train_batch_end` what the step returned as a dict with the loss, of a module or of a callback."""

    @wraps(hook)
    def called(self: Any, *given: Any) -> None:
        *before, outputs, batch, index = given
        trainer = before[0] if before else self.trainer
        hook(self, *before, _step_outputs(outputs, trainer.accumulate_grad_batches), batch, index)

    return called


def _step_outputs(outputs: Any, window: int) -> Any:
    """Return what a step returned as Lightning hands it on: detached, the loss divided by the batches of a step."""
    found = {"loss": outputs} if isinstance(outputs, Tensor) else {} if outputs is None else outputs
    if not isinstance(found, Mapping):
        return found
    detached = convert({**found}, Tensor.detach)
    loss = detached.get("loss")
    return {**detached, "loss": loss / window} if window > 1 and isinstance(loss, Tensor) else detached


def _of_modules(hook: Method) -> Method:
    """Return what a module's `on_train_batch_start` returns, and nothing of a callback's, as Lightning does."""

    @wraps(hook)
    def called(self: Any, *given: Any) -> Any:
        returned, is_module = hook(self, *given), len(given) == 2
        return returned if is_module else None

    return called


def _saving(hook: Method) -> Method:
    """Show `on_save_checkpoint` what Lightning's checkpoint has; what it adds is kept, and the weights whole."""

    @wraps(hook)
    def called(self: Any, *owners: Any) -> None:
        *before, checkpoint = owners
        given = _shown(before[1] if before else self)
        whole = {**checkpoint, **given}
        hook(self, *before, whole)
        checkpoint.update({key: value for key, value in whole.items() if key not in given})

    return called


def _loading(hook: Method) -> Method:
    """Show `on_load_checkpoint` what Lightning's checkpoint has; the module has its weights back by then."""

    @wraps(hook)
    def called(self: Any, *owners: Any) -> None:
        *before, checkpoint = owners
        hook(self, *before, {**checkpoint, **_shown(before[1] if before else self)})

    return called


def _shown(module: Any) -> dict[str, Any]:
    return checkpoint_of(module, module.state_dict())


_WRAPPERS: dict[str, Callable[[Method], Method]] = {
    "on_load_checkpoint": _loading,
    "on_save_checkpoint": _saving,
    "on_train_batch_end": _with_loss,
    "on_train_batch_start": _of_modules,
}
