"""The attributes of an object, wherever its class keeps them."""

import itertools
from typing import Any

from torch import nn

__all__ = ["INTERNAL", "attributes_of"]

#: what nn.Module keeps of its own
INTERNAL = frozenset(vars(nn.Module()))
#: of these, those that hold state of a module that no other part keeps
_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules", "training"})


def attributes_of(value: object) -> dict[str, Any]:
    """Return the attributes of an object by name, those in slots included; of a module, those that hold its state."""
    found = {name: value for name, value in getattr(value, "__dict__", {}).items() if not _is_own(value)}
    if isinstance(value, nn.Module):
        internal = INTERNAL - _OF_MODULES
        return {name: item for name, item in vars(value).items() if name not in internal}
    for name in _slots(type(value)):
        try:
            found[name] = getattr(value, name)
        except AttributeError:  # not set
            continue
    return found


def _is_own(value: object) -> bool:
    return type(value).__module__.startswith("midstride.engine")


def _slots(kind: type) -> tuple[str, ...]:
    found = [vars(base).get("__slots__", ()) for base in kind.__mro__[:-1]]
    named = itertools.chain.from_iterable([slots] if isinstance(slots, str) else slots for slots in found)
    return tuple(name for name in named if name not in ("__dict__", "__weakref__"))
