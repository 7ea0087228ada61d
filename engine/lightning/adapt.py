"""Replaces the class of a Lightning object, in place, by one that the engine can run.

Methods that the user wrote are kept; those of Lightning's base classes are replaced by the engine's.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any

from torch import Tensor, nn

from midstride.engine.errors import UserError
from midstride.engine.lightning.callbacks import LightningCallback
from midstride.engine.lightning.checkpoint import checkpoint_of
from midstride.engine.lightning.module import LightningData, LightningMethods
from midstride.engine.modules.module import LOADERS, MODE_HOOKS, STEP_HOOKS, TRANSFER_HOOKS, attach
from midstride.engine.trees import convert

__all__ = ["adapt", "is_lightning", "wrap_hook"]

_PACKAGES = ("lightning", "pytorch_lightning")
#: name of a base class of Lightning's -> class whose methods replace its methods
_REPLACEMENTS: dict[str, type] = {
    "LightningModule": LightningMethods,
    "LightningDataModule": LightningData,
    "Callback": LightningCallback,
}
#: base class -> optional methods: None on the adapted class if the user has not written them
_OPTIONAL = {
    "LightningModule": (*STEP_HOOKS, *TRANSFER_HOOKS, *LOADERS, *MODE_HOOKS),
    "LightningDataModule": TRANSFER_HOOKS,
    "Callback": (),
}
#: methods of Lightning's base classes that are not replaced
_KEPT = ("__init__", "automatic_optimization", "load_from_checkpoint", "load_state_dict", "save_hyperparameters")


def is_lightning(kind: type) -> bool:
    """Return whether `kind` is a LightningModule, LightningDataModule or Lightning Callback."""
    return _base(kind) is not None


def adapt(value: Any) -> Any:
    """Return `value`, adapted in place with all submodules of Lightning's classes."""
    for owner in value.modules() if isinstance(value, nn.Module) else [value]:
        kind: Any = type(owner)
        if not issubclass(kind, tuple(_REPLACEMENTS.values())) and (base := _base(kind)) is not None:
            owner.__class__ = _adapted(kind)
            if base.__name__ != "Callback":
                attach(owner, None)
    return value


def _base(kind: type) -> type | None:
    """Return the base class of Lightning's that `kind` derives from, or None."""
    bases = (b for b in kind.__mro__ if b.__name__ in _REPLACEMENTS and b.__module__.partition(".")[0] in _PACKAGES)
    return next(bases, None)


@cache
def _adapted(kind: type) -> type:
    """Return a subclass of `kind` in which the engine's methods override Lightning's."""
    base = _base(kind)
    assert base is not None
    written = {name for one in kind.__mro__ if one not in base.__mro__ for name in vars(one)}
    unwritten = {name: None for name in _OPTIONAL[base.__name__] if name not in written}
    wrapped = {name: method for name in written if (method := wrap_hook(kind, name)) is not None}
    named = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    bases = (_replacement(base),) if kind is base else (kind, _replacement(base))
    return type(kind.__name__, bases, {**unwritten, **wrapped, **named, "_written": kind, "__reduce_ex__": _reduce_ex})


@cache
def _replacement(base: type) -> type:
    """Return a class between a user's class and `base`, to which `super().log(...)` leads."""
    kept = {name: inspect.getattr_static(base, name) for name in _KEPT if hasattr(base, name)}
    return type(base.__name__, (_REPLACEMENTS[base.__name__], base), kept)


def _reduce_ex(self: Any, protocol: Any) -> tuple[Any, ...]:
    """Pickle and copy by the user's class: the adapted class cannot be imported by name."""
    state = self.__getstate__()
    if isinstance(state, dict) and "_trainer" in state:
        state = {**state, "_trainer": []}
    return _blank, (self._written,), state


def _blank(kind: type) -> Any:
    """Return an instance of the adapted `kind` without attributes; pickles name this function."""
    adapted: Any = _adapted(kind)
    return adapted.__new__(adapted)


Method = Callable[..., Any]


def wrap_hook(kind: type, name: str) -> Method | None:
    """Return a wrapper of the method `name` of the user's class `kind`; None if it needs none.

    Raises:
        UserError: it is a step that takes the loader's iterator.
    """
    method = getattr(kind, name)
    if method is None:  # a class sets a step to None that its base has
        return None
    if name in _STEPS:
        _ensure_no_iterator(kind, name)
        return _without_index(method) if _takes_batch_only(method) else None
    return _WRAPPERS[name](method) if name in _WRAPPERS else None


_STEPS = frozenset({"training_step", "validation_step", "test_step", "predict_step"})


def _ensure_no_iterator(kind: type, name: str) -> None:
    """Raise UserError for a step with `dataloader_iter`, whose prefetched data cannot resume."""
    if "dataloader_iter" in inspect.signature(getattr(kind, name)).parameters:
        raise UserError(
            f"{kind.__name__}.{name} takes dataloader_iter, but midstride passes a batch to each step. Write "
            f"{name}(self, batch, batch_idx), or let several loaders give one batch (CombinedLoader)"
        )


def _takes_batch_only(step: Method) -> bool:
    """Return whether `step` takes only `self` and a batch; Lightning then passes no index."""
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
    """Return `outputs` in Lightning's form: a detached dict, the loss divided by `window`."""
    found = {"loss": outputs} if isinstance(outputs, Tensor) else {} if outputs is None else outputs
    if not isinstance(found, Mapping):
        return found
    detached = convert({**found}, Tensor.detach)
    loss = detached.get("loss")
    return {**detached, "loss": loss / window} if window > 1 and isinstance(loss, Tensor) else detached


def _wrap_train_batch_start(hook: Method) -> Method:
    """Return a module's hook with its result, or a callback's without, as Lightning does."""

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
    """Pass the checkpoint with Lightning's entries, after the weights were restored."""

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
