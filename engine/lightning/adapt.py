"""Replaces the class of a Lightning object by a derived one that the engine can run, in place.

Methods that the user wrote are kept; those of Lightning's base classes are replaced by the engine's.
"""

import inspect
from functools import cache
from typing import Any

from torch import nn

from midstride.engine.lightning.callbacks import LightningCallback
from midstride.engine.lightning.hooks import wrap_hook
from midstride.engine.lightning.module import LightningData, LightningMethods
from midstride.engine.modules.module import LOADERS, STEP_HOOKS, TRANSFER_HOOKS, attach

__all__ = ["adapt", "is_lightning"]

_PACKAGES = ("lightning", "pytorch_lightning")
#: name of a base class of Lightning's -> class whose methods replace its methods
_REPLACEMENTS: dict[str, type] = {
    "LightningModule": LightningMethods,
    "LightningDataModule": LightningData,
    "Callback": LightningCallback,
}
#: base class -> optional methods: None on the adapted class if the user has not written them
_OPTIONAL = {
    "LightningModule": (*STEP_HOOKS, *TRANSFER_HOOKS, *LOADERS),
    "LightningDataModule": TRANSFER_HOOKS,
    "Callback": (),
}
#: methods of Lightning's base classes that are not replaced
_KEPT = ("__init__", "automatic_optimization", "load_from_checkpoint", "load_state_dict", "save_hyperparameters")


def is_lightning(kind: type) -> bool:
    """Return whether `kind` derives from LightningModule, LightningDataModule or Lightning's Callback."""
    return _base(kind) is not None


def adapt(value: Any) -> Any:
    """Return `value` itself; it and all its submodules are adapted in place if they are of Lightning's classes."""
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
    """Return a class derived from `kind` in which the engine's methods override those of Lightning's base class."""
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
    """Return a class to put between a user's class and `base`, so that `super().log(...)` calls the engine's `log`."""
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
