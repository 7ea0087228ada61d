"""Classes by name: whether their objects can be rebuilt, and from attributes alone."""

import copyreg
import dataclasses
import sys
import types
from collections import deque
from enum import Enum
from functools import lru_cache
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    Sampler,
    StackDataset,
    Subset,
    TensorDataset,
)

from midstride.engine.code_origin import is_user_class, module_of
from midstride.engine.metrics.torchmetrics_internals import is_kind_of_metric, set_anew
from midstride.engine.objects.attributes import attributes_of, made_by, new_locks
from midstride.engine.objects.kinds.kind import MISSING
from midstride.engine.state.object_nodes import kind_name, loaded

__all__ = [
    "BASES",
    "CONTAINERS",
    "TORCH_DATA",
    "can_be_fresh",
    "class_called",
    "fresh",
    "has_attributes",
    "is_library",
    "is_made_anew",
    "is_of_a_process",
    "is_of_attributes",
    "keeps_attributes",
    "set_class",
    "sets_state",
    "states_attributes",
]

#: classes of torch whose objects can be rebuilt
_MADE_ANEW = (nn.Module, Optimizer, LRScheduler)
#: data sets of torch whose attributes are all of their state
TORCH_DATA: tuple[type[Any], ...] = (Subset, ConcatDataset, ChainDataset, StackDataset, TensorDataset)
#: classes of libraries whose attributes and items are all of their state
_BY_ATTRIBUTES = frozenset(
    {
        *("types:SimpleNamespace", "argparse:Namespace", "collections:UserDict", "collections:UserList"),
        *("collections:UserString", "collections:ChainMap"),
        *("queue:LifoQueue", "queue:PriorityQueue", "queue:Queue", "threading:Event"),
        *("threading:BoundedSemaphore", "threading:Semaphore"),
        *("lightning.fabric.utilities.data:AttributeDict", "lightning_fabric.utilities.data:AttributeDict"),
        "midstride.engine:Hyperparameters",
        *map(kind_name, TORCH_DATA),
    }
)
#: of these, classes of which another attempt has the objects
_IN_EACH_ATTEMPT = frozenset(
    f"midstride.engine:Lightning{part}" for part in ("Logger", "Optimizer", "Strategy", "Trainer")
)
#: packages in which attributes are all of an object's state
_OF_TORCH = ("torch.optim", "torch.distributions", "torch.distributed.algorithms")
#: immutable built-in types that users derive classes from
BASES: tuple[type[Any], ...] = (int, float, complex, str, bytes, frozenset)
#: base classes whose attributes and items are all of their state
CONTAINERS = (object, list, dict, set, deque, types.SimpleNamespace)
_NEW = tuple(kind.__new__ for kind in CONTAINERS)
#: packages whose objects belong to one process, such as threads, files and graphs of a compiler
_OF_A_PROCESS = (
    *("asyncio", "concurrent", "contextlib", "ctypes", "importlib", "inspect", "io", "logging", "multiprocessing"),
    *("os", "selectors", "socket", "ssl", "subprocess", "tempfile", "threading", "traceback", "types", "typing"),
    *("unittest", "weakref", "functools", "abc", "enum", "midstride", "lightning", "pytorch_lightning"),
    *("torch.autograd", "torch.cuda", "torch.distributed", "torch.export", "torch.fx", "torch.jit", "torch.profiler"),
    *("torch.utils.data", "torch.utils.hooks", "torch.utils.tensorboard", "torchdata", "pluggy", "_pytest"),
)
#: classes with a `close` whose attributes show what they hold open
_CLOSED_FREELY = frozenset(
    {
        *("gymnasium.core:Env", "gymnasium.vector.vector_env:VectorEnv"),
        "stable_baselines3.common.vec_env.base_vec_env:VecEnv",
    }
)
#: classes of data that loaders and samplers keep by other means
_OF_LOADERS = (DataLoader, IterableDataset, Sampler)


def is_library(kind: type) -> bool:
    """Return whether `kind` is a library's class, whose attributes may not be all its state."""
    if kind_name(kind) in _BY_ATTRIBUTES | _IN_EACH_ATTEMPT or issubclass(kind, nn.Module):
        return False
    if module_of(kind).startswith(_OF_TORCH) and module_of(kind) in sys.modules:
        return False
    return not is_user_class(kind)


def keeps_attributes(kind: type) -> bool:
    """Return whether attributes and items are all of the state of objects of a library's class.

    It is written in Python, holds nothing that is closed, and pickle would restore it by its attributes.

    >>> import textwrap, zipfile
    >>> keeps_attributes(textwrap.TextWrapper), keeps_attributes(zipfile.ZipFile)
    (True, False)
    """
    return _keeps_attributes(kind)


def states_attributes(value: object) -> bool:
    """Return whether a library's object gives pickle its attributes, as those of scikit-learn.

    It can add to them, for example its version. The first object of a class decides for all: what it leaves out, such
    as a cache, can be empty at times.
    """
    kind: Any = type(value)
    if kind not in _states_attributes:
        _states_attributes[kind] = _can_state_attributes(kind) and _is_its_state(value)
    return _states_attributes[kind]


#: class -> whether its first object gave pickle its attributes
_states_attributes: dict[type, bool] = {}


def _can_state_attributes(kind: Any) -> bool:
    return _has_own_state(kind) and _is_made_of_attributes(kind)


def _is_its_state(value: Any) -> bool:
    """Return whether the state that `value` gives pickle holds all of its attributes."""
    kind: Any = type(value)
    try:
        state = kind.__getstate__(value)
    except Exception:  # of a library
        return False
    return isinstance(state, dict) and all(state.get(key) is one for key, one in attributes_of(value).items())


@lru_cache(maxsize=1024)  # asked of each library's object as it is restored
def _keeps_attributes(kind: Any) -> bool:
    is_record = dataclasses.is_dataclass(kind) or "__attrs_attrs__" in vars(kind)
    return _is_made_of_attributes(kind) and (is_record or not _has_own_state(kind))


@lru_cache(maxsize=1024)
def _is_made_of_attributes(kind: Any) -> bool:
    """Return whether `kind` is a library's, in Python, and pickled by a state."""
    if not is_library(kind) or issubclass(kind, (*_OF_LOADERS, *BASES, tuple, Enum)):
        return False
    if is_of_a_process(module_of(kind)) or kind in copyreg.dispatch_table:
        return False
    base = made_by(kind)
    is_open = hasattr(kind, "close") and not any(kind_name(one) in _CLOSED_FREELY for one in kind.__mro__)
    if base not in CONTAINERS or kind is base or is_open or not has_attributes(kind):
        return False
    return all(getattr(kind, name) is getattr(base, name) for name in ("__reduce__", "__reduce_ex__"))


def is_of_a_process(module: str) -> bool:
    """Return whether objects of a module's classes belong to one process."""
    return module.startswith("torch._") or any(module == one or module.startswith(f"{one}.") for one in _OF_A_PROCESS)


def _has_own_state(kind: Any) -> bool:
    """Return whether pickle keeps another state of an object than its attributes."""
    default: Any = object
    return hasattr(kind, "__setstate__") and kind.__getstate__ is not default.__getstate__


def sets_state(kind: Any) -> bool:
    """Return whether objects of `kind` derive values from the attributes that pickle returns."""
    default: Any = object
    return hasattr(kind, "__setstate__") and kind.__getstate__ is default.__getstate__


def has_attributes(kind: type) -> bool:
    """Return whether objects of `kind` can have attributes, unlike those of C such as locks."""
    return any("__dict__" in vars(base) or "__slots__" in vars(base) for base in kind.__mro__)


def is_of_attributes(kind: type) -> bool:
    """Return whether all state of data sets of the class `kind` is in their attributes.

    >>> is_of_attributes(Subset), is_of_attributes(list), is_of_attributes(type("Rows", (list,), {}))
    (True, False, False)
    """
    return (kind in TORCH_DATA or is_user_class(kind)) and made_by(kind) is object


def class_called(kind: str, live: Any, base: type) -> Any:
    """Return the class called `kind`, the live object's or a loaded one of the user's, if any."""
    if live is not MISSING and kind_name(type(live)) == kind:
        return type(live)
    found: Any = loaded(kind)
    if not isinstance(found, type) or not issubclass(found, base):
        return None
    is_known = issubclass(found, _MADE_ANEW) or (issubclass(found, tuple) and hasattr(found, "_fields"))
    is_known = is_known or issubclass(found, Enum) or keeps_attributes(found)
    is_known = is_known or _can_state_attributes(found) or module_of(found).startswith(_OF_TORCH)
    return found if is_known or is_user_class(found) or kind in _BY_ATTRIBUTES else None


def set_class(owner: object, kind: str) -> bool:
    """Set the class of a live object to that called `kind`; return whether it has it now."""
    if kind_name(type(owner)) == kind:
        return True
    try:
        object.__setattr__(owner, "__class__", class_called(kind, MISSING, object))
    except TypeError:  # there is none, or objects of it are laid out otherwise
        return False
    return True


@lru_cache(maxsize=1024)  # asked for each object at every snapshot
def is_made_anew(kind: type) -> bool:
    """Return whether an object of `kind` can be rebuilt without the code that made it."""
    return class_called(kind_name(kind), MISSING, object) is kind and kind.__new__ in _NEW


def can_be_fresh(kind: Any) -> bool:
    """Return whether `fresh` can make an object of the class `kind`."""
    return kind is not None and kind.__new__ in _NEW and not (hasattr(kind, "__del__") and is_library(kind))


def fresh(kind: Any) -> Any:
    """Return an object of `kind` without a call of `__init__`; None if there is no such class."""
    if not can_be_fresh(kind):
        return None
    made = kind.__new__(kind)
    if isinstance(made, nn.Module):
        nn.Module.__init__(made)
    if is_kind_of_metric(kind):
        set_anew(made)
    for name, lock in new_locks(kind).items():
        object.__setattr__(made, name, lock)
    return made
