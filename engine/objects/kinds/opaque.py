"""Objects of which a snapshot holds the class only: no file can hold them, or they are data."""

import inspect
import io
import logging
import sys
import threading
import types
import weakref
from collections.abc import Callable
from concurrent.futures import Executor
from multiprocessing.pool import Pool
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.hooks import RemovableHandle

from midstride.engine.code_origin import is_user_module
from midstride.engine.objects.attributes import made_by
from midstride.engine.objects.classes import BASES, CONTAINERS, class_called, is_library, keeps_attributes
from midstride.engine.objects.kinds.kind import MISSING, Kind
from midstride.engine.state.object_nodes import Instance, kind_name, kind_text

if TYPE_CHECKING:
    from midstride.engine.objects.restore import GraphRestore
    from midstride.engine.objects.walk import GraphWalk

__all__ = [
    "CLASS",
    "DATA",
    "LEFT_OUT",
    "MADE_IN_EACH_PROCESS",
    "MAKERS",
    "OPAQUE",
    "WATCHED",
    "LeftOut",
    "Opaque",
    "class_found",
    "compared_node",
    "is_found",
    "is_made_in_each_process",
    "is_remade",
]

#: form of a class that is not a constant
CLASS = "class"

#: types of constants in code, which every attempt has
_CONSTANT = (type, types.ModuleType, logging.Logger, property, inspect.Signature, RemovableHandle)
#: classes of libraries whose objects do not change by themselves; data sets among them are watched
DATA = (Dataset, DataLoader, Sampler)
#: of these, the class whose changes are reported
WATCHED = Dataset
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition)
#: what they work on is in futures and results, which are named
_POOLS = (Executor, Pool)
#: classes of what a library's object holds for itself in each process
_OF_A_PROCESS = (
    *(*_LOCKS, threading.Event, threading.local),
    *(weakref.ref, weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, io.IOBase),
)
MADE_IN_EACH_PROCESS = frozenset(map(kind_name, _OF_A_PROCESS))
#: name of such a class -> function that returns a free lock or an empty container
MAKERS: dict[str, Callable[[], object]] = {
    kind_name(type(make())): make
    for make in (
        *(threading.Lock, threading.RLock, threading.Condition, threading.Event, threading.local),
        *(weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary),
    )
}
#: built-in classes by name
_PLAIN_CLASSES: dict[str, Any] = {
    kind_name(kind): kind for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, object)
}
#: a trainer that a previously trained module holds, such as a teacher; a loop and its loaders that its script holds
_OURS = frozenset(f"midstride.engine:{name}" for name in ("Trainer", "Loop", "LoopLoader"))
#: ranks that meet, which each attempt builds
_RANKS = frozenset({"torch.distributed.distributed_c10d:ProcessGroup", "torch.distributed.device_mesh:DeviceMesh"})
#: package whose objects each attempt makes anew as it compiles
_COMPILED = "torch._dynamo."


class Opaque(Kind):
    """Objects that no file can hold. A warning names them, unless every attempt has them."""

    form = "opaque"
    is_described = is_filled = False

    def matches(self, kind: type) -> bool:
        """Return whether `kind` is a constant of code, data of a library, or written in C."""
        if issubclass(kind, (tuple, *_CONSTANT, Tensor, IterableDataset)):
            return True
        if not is_library(kind):
            return not issubclass(kind, BASES) and made_by(kind) not in CONTAINERS
        if kind_name(kind).startswith("midstride.engine"):  # ours are kept elsewhere
            return True
        return issubclass(kind, DATA) and not keeps_attributes(kind)

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return a value's class, and record how it is watched: as constant, by comparison, not."""
        walk.meet(value, path)
        kind = kind_name(type(value))
        # A weak proxy gives another's class, or fails.
        if issubclass(type(value), _CONSTANT) and not _is_own_module(value):
            kind = kind_text(value.__module__, value.__qualname__) if hasattr(value, "__qualname__") else kind
            walk.constants[path] = kind
            if isinstance(value, type) and (is_remade(kind) or is_found(value)):
                return Instance(CLASS, kind)
        elif kind in _OURS or any(kind_name(one) in _RANKS for one in type(value).__mro__):
            walk.constants[path] = kind
        elif walk.is_in_library and is_made_in_each_process(value):
            return Instance(self.form, kind)  # the library makes it in each process, maybe on first use
        elif _is_idle(value):
            walk.idle[path] = value
        elif walk.is_quiet:
            walk.constants[path] = kind
            walk.held[path] = value
        # Of what can be closed, such as a database, attributes do not show the content.
        elif callable(value) and not (isinstance(value, weakref.ref) or hasattr(type(value), "close")):
            return compared_node(walk, value, path)
        else:
            walk.opaque[path] = value
        return Instance(self.form, kind)

    def lost_part(self, restore: "GraphRestore", node: Any, live: Any, *, is_late: bool) -> Any:
        """Return the node, unless `live` is such an object or one can be made."""
        can_make = MAKERS if is_late else MADE_IN_EACH_PROCESS  # one made late lacks what an `__init__` makes
        return None if node.kind in can_make or restore.is_same_opaque(node, live) else node

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Keep the live object if it has the same class, else make a lock or an empty container."""
        if node.kind in MAKERS and (live is MISSING or kind_name(type(live)) != node.kind):
            return restore.record(MAKERS[node.kind](), path)
        if live is MISSING and node.kind in MADE_IN_EACH_PROCESS:
            restore.mark_changed()
            return live
        if not restore.is_same_opaque(node, live) or restore.is_anchor(live):
            return restore.mark_stale(path, node.kind, live)
        return restore.record(live, path)


def is_found(kind: type) -> bool:
    """Return whether a snapshot can name the class `kind`."""
    return class_found(kind_name(kind)) is kind


def class_found(name: str) -> Any:
    """Return the class called `name` if a snapshot can name it, else None."""
    return _PLAIN_CLASSES.get(name) or class_called(name, MISSING, object)


def is_made_in_each_process(value: object) -> bool:
    """Return whether `value` is a lock, a pool, a file or the like, which each process makes."""
    return issubclass(type(value), (*_OF_A_PROCESS, *_POOLS))


def _is_idle(value: object) -> bool:
    """Return whether `value` is a free lock, a pool, or connections of a thread: none has state."""
    if type(value) is threading.local:
        held = value.__dict__.values()  # of this thread
        return all(is_made_in_each_process(one) or hasattr(type(one), "close") for one in held)
    if issubclass(type(value), _LOCKS):
        return repr(value).startswith(("<unlocked", "<Condition(<unlocked"))  # before 3.14 an RLock says it there only
    return issubclass(type(value), _POOLS)


def is_remade(kind: str) -> bool:
    """Return whether a function of a library makes the class `kind`, as it would again."""
    return "<locals>" in kind and not is_user_module(kind.partition(":")[0])


def compared_node(walk: "GraphWalk", value: Any, path: str) -> Instance:
    """Return the class of a library's object; a change of the object is reported."""
    walk.meet(value, path)
    kind = kind_name(type(value))
    walk.constants[path] = kind
    if not kind.startswith(_COMPILED):
        walk.compared[path] = value
    return Instance(Opaque.form, kind)


def _is_own_module(value: object) -> bool:
    """Return whether `value` is a Python module made by code, which may hold anything."""
    return isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is not value


class LeftOut(Kind):
    """Values that are data rather than state: large, shared by processes, or deeply nested."""

    form = "large"

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the class of the value."""
        walk.meet(value, path)
        return self.instance(value)

    def lost_part(self, restore: "GraphRestore", node: Any, live: Any, *, is_late: bool) -> Any:
        """Return the node if nothing has built the value."""
        return node if is_late else None

    def restore(self, restore: "GraphRestore", node: Instance, live: Any, path: str) -> Any:
        """Keep the live value if it would be left out, too."""
        return restore.record(live, path) if restore.is_left_out(live) else restore.mark_stale(path, node.kind, live)


OPAQUE, LEFT_OUT = Opaque(), LeftOut()
