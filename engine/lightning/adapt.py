"""An object of Lightning's becomes one of ours, in place: its class gets what the engine asks for.

Every method that the user has written stays; those of Lightning's base classes give way to the engine's.
"""

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch import nn

from midstride.engine.lightning.callbacks import LightningCallback
from midstride.engine.lightning.data import LightningData
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
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
#: what Lightning's classes do well enough themselves
_KEPT = frozenset({"automatic_optimization", "load_from_checkpoint", "load_state_dict", "save_hyperparameters"})


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
    base = _base(kind)
    assert base is not None
    role = _ROLES[base.__name__]
    written = {name for one in kind.__mro__ if one not in base.__mro__ for name in vars(one)}
    ours = [vars(one) for one in reversed(role.__mro__) if one.__module__.startswith("midstride.")]
    taken = {name: value for names in ours for name, value in names.items() if not name.startswith("__")}
    if base.__name__ == "LightningModule":  # of a hook that is not written nothing is found
        taken |= dict.fromkeys((*STEP_HOOKS, *TRANSFER_HOOKS, *LOADERS))
    elif base.__name__ == "LightningDataModule":
        taken |= dict.fromkeys(TRANSFER_HOOKS)
    namespace = {name: value for name, value in taken.items() if name not in written | _KEPT}
    namespace |= {
        name: _of_batch(getattr(kind, name)) for name in _STEPS if name in written and _takes_batch(kind, name)
    }
    namespace |= {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind, role), {**namespace, "__reduce_ex__": _reduced})


def _takes_batch(kind: type, step: str) -> bool:
    """Return whether `step` takes a batch and nothing else; Lightning then gives it nothing else."""
    taken = inspect.signature(getattr(kind, step)).parameters.values()
    return len(taken) == 2 and all(one.kind is one.POSITIONAL_OR_KEYWORD for one in taken)


def _of_batch(step: Callable[..., Any]) -> Callable[..., Any]:
    return wraps(step)(lambda self, batch, *_: step(self, batch))


def _reduced(self: Any, protocol: Any) -> tuple[Any, ...]:
    """Pickle and copy as what the user wrote: the class that was made of theirs is in no file."""
    state = self.__getstate__()
    if isinstance(state, dict) and "_trainer" in state:
        state = {**state, "_trainer": []}
    return _blank, (type(self).__mro__[1],), state


def _blank(kind: type) -> Any:
    made: Any = _adapted(kind)
    return made.__new__(made)
