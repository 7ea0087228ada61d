"""Finds the modules, parameters and buffers of a module by name, again and again.

Models with thousands of layers take a while for that, and every part of a state asks at every snapshot. So names are
kept, and looked up anew only where a module, a parameter or a buffer was added, removed, replaced or renamed.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, compress
from operator import methodcaller
from typing import Any

from torch import Tensor, nn

from midstride.engine.state.torch_internals import has_plain_names, members_of, transient_buffers_of

__all__ = ["Members", "ModuleIndex"]


@dataclass(slots=True)
class Members:
    """The members of a module at one moment.

    Args:
        modules: as `named_modules` yields them.
        parameters: as `named_parameters` yields them.
        buffers: as `named_buffers` yields them.
        tensors: parameters and buffers, module by module; a tensor with several names is here several times.
        version: number that stays the same while all of these are the same objects under the same names.
    """

    modules: dict[str, nn.Module]
    parameters: dict[str, Any]
    buffers: dict[str, Any]
    tensors: list[Tensor]
    version: int


class ModuleIndex:
    """The members of a module.

    It keeps neither them nor the module alive, except in a block of `kept`.

    Args:
        module: the module, whose members can change at any time.
    """

    def __init__(self, module: nn.Module) -> None:
        self._reference = weakref.ref(module)
        self._version = 0
        self._names: _Names | None = None
        self._is_kept = False
        self._kept: Members | None = None

    @classmethod
    def of(cls, module: nn.Module) -> "ModuleIndex":
        """Return the index of `module`, which all parts of a state share."""
        number = id(module)
        if number not in _INDICES:
            _INDICES[number] = cls(module)
            weakref.finalize(module, _INDICES.pop, number).atexit = False
        return _INDICES[number]

    @property
    def _module(self) -> nn.Module:
        module = self._reference()
        assert module is not None, "the owner of the index holds the module"
        return module

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Look the members up once in the block, and again after each call of `forget`."""
        self._is_kept = True
        try:
            yield
        finally:
            self._is_kept, self._kept = False, None

    def forget(self) -> None:
        """Note in a block of `kept` that members may have been added, removed or replaced."""
        self._kept = None

    def now(self) -> Members:
        """Return the members of the module as they are now."""
        if self._kept is not None:
            return self._kept
        found = self._found()
        if self._is_kept:
            self._kept = found
        return found

    def _found(self) -> Members:
        found = None if self._names is None else self._names.members(self._version)
        if found is None:
            self._version += 1
            modules = dict(self._module.named_modules())
            parameters, buffers = dict(self._module.named_parameters()), dict(self._module.named_buffers())
            contents = _Contents([*modules.values()])
            tensors = [value for value in contents.values if isinstance(value, Tensor)]
            found = Members(modules, parameters, buffers, tensors, self._version)
            self._names = _Names.of(found, contents) if has_plain_names(self._module, modules.values()) else None
        return found


#: by the id of the module: modules of a dataclass can be equal
_INDICES: dict[int, ModuleIndex] = {}


class _Contents:
    """The children, parameters and buffers of each of `owners`, in one list."""

    def __init__(self, owners: Sequence[nn.Module]) -> None:
        containers, transient = members_of(owners), transient_buffers_of(owners)
        sizes = [*map(len, containers)]
        filled = [*compress(containers, sizes)]  # a third of them
        self.values = [*chain.from_iterable(map(methodcaller("values"), filled))]
        names = [*chain.from_iterable(map(methodcaller("keys"), filled))]
        hidden = [(number, {*own}) for number, own in enumerate(transient) if own] if any(transient) else []
        #: everything that the names of members depend on; the same ids mean that the same members are shared
        self.facts = sizes, names, [*map(id, self.values)], hidden


class _Names:
    """The names of members, and weak references to the modules.

    Tensors get none: torch cannot swap tensors that have weak references.
    """

    def __init__(self, members: Members, contents: _Contents, places: dict[int, int]) -> None:
        self._paths, self._owners = [*members.modules], [weakref.ref(owner) for owner in members.modules.values()]
        self._facts = contents.facts
        self._tensors = [number for number, value in enumerate(contents.values) if isinstance(value, Tensor)]
        self._parameters = {name: places[id(tensor)] for name, tensor in members.parameters.items()}
        self._buffers = {name: places[id(tensor)] for name, tensor in members.buffers.items()}

    @classmethod
    def of(cls, members: Members, contents: _Contents) -> "_Names | None":
        """Return the names of `members`; None if the module is not as torch builds modules."""
        places = {id(value): number for number, value in enumerate(contents.values)}
        try:
            return cls(members, contents, places)
        except (KeyError, TypeError):  # a name for something elsewhere, or a module without weak references
            return None

    def members(self, version: int) -> Members | None:
        """Return the members; None if they are not those that the names are of."""
        owners: list[Any] = [reference() for reference in self._owners]
        if any(owner is None for owner in owners):
            return None
        contents = _Contents(owners)
        if contents.facts != self._facts:
            return None
        values = contents.values
        return Members(
            dict(zip(self._paths, owners, strict=True)),
            {name: values[place] for name, place in self._parameters.items()},
            {name: values[place] for name, place in self._buffers.items()},
            [values[place] for place in self._tensors],
            version,
        )
