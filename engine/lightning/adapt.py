"""An object of Lightning's becomes one of ours, in place: its class gets what the engine asks for.

Every method that the user has written stays; those of Lightning's base classes give way to the engine's.
"""

import inspect
from functools import cache
from typing import Any

from torch import nn

from midstride.engine.lightning.callbacks import LightningCallback
from midstride.engine.lightning.data import LightningData
from midstride.engine.lightning.hooks import wrapped
from midstride.engine.lightning.module import LightningMethods
from midstride.engine.modules.module import LOADERS, STEP_HOOKS, TRANSFER_HOOKS, attach

__all__ = ["adapt", "is_lightning"]

_PACKAGES = ("lightning", "pytorch_lightning")
#: a base class of Lightning's -> what takes its place
_ROLES: dict[str, type] = {
    "LightningModule": LightningMethods,
    "LightningDataModule": LightningData,
    "Callback": LightningCallback,
}
#: of each, what is asked for and may be missing: of a hook that is not written nothing is found
_OPTIONAL = {
    "LightningModule": (*STEP_HOOKS, *TRANSFER_HOOKS, *LOADERS),
    "LightningDataModule": TRANSFER_HOOKS,
    "Callback": (),
}
#: what Lightning's classes do well enough themselves
_KEPT = ("__init__", "automatic_optimization", "load_from_checkpoint", "load_state_dict", "save_hyperparameters")


def is_lightning(kind: type) -> bool:
    """Return whether `kind` derives from a module, a data module or a callback of Lightning's."""
    return _base(kind) is not None


def adapt(value: Any) -> Any:
    """Return `value`; what of it is of Lightning's classes, modules within it too, has become ours."""
    for owner in value.modules() if isinstance(value, nn.Module) else [value]:
        kind: Any = type(owner)
        if not issubclass(kind, tuple(_ROLES.values())) and (base := _base(kind)) is not None:
            owner.__class__ = _adapted(kind)
            if base.__name__ != "Callback":
                attach(owner, None)
    return value


def _base(kind: type) -> type | None:
    """Return the class of Lightning's that `kind` plays the role of."""
    bases = (b for b in kind.__mro__ if b.__name__ in _ROLES and b.__module__.partition(".")[0] in _PACKAGES)
    return next(bases, None)


@cache
def _adapted(kind: type) -> type:
    """Return `kind` with our methods in place of those of Lightning's that it has not written."""
    base = _base(kind)
    assert base is not None
    written = {name for one in kind.__mro__ if one not in base.__mro__ for name in vars(one)}
    unwritten = {name: None for name in _OPTIONAL[base.__name__] if name not in written}
    ours = {name: method for name in written if (method := wrapped(kind, name)) is not None}
    named = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    bases = (_role(base),) if kind is base else (kind, _role(base))
    return type(kind.__name__, bases, {**unwritten, **ours, **named, "_written": kind, "__reduce_ex__": _reduced})


@cache
def _role(base: type) -> type:
    """Return what stands between a user's class and `base`, so that `super().log(...)` of the user's is ours too."""
    kept = {name: inspect.getattr_static(base, name) for name in _KEPT if hasattr(base, name)}
    return type(base.__name__, (_ROLES[base.__name__], base), kept)


def _reduced(self: Any, protocol: Any) -> tuple[Any, ...]:
    """Pickle and copy as what the user wrote: the class that was made of theirs is in no file."""
    state = self.__getstate__()
    if isinstance(state, dict) and "_trainer" in state:
        state = {**state, "_trainer": []}
    return _blank, (self._written,), state


def _blank(kind: type) -> Any:
    made: Any = _adapted(kind)
    return made.__new__(made)
