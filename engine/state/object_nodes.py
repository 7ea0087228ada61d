"""Nodes of a tree of state that describe objects: references, views and instances."""

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from midstride.engine.code_origin import module_of

__all__ = [
    "Instance",
    "Same",
    "View",
    "instances_in",
    "key_path",
    "kind_name",
    "kind_text",
    "loaded",
    "owners_of",
    "step",
    "value_path",
]

#: prefix of the kinds of the engine's classes
_ENGINE = "midstride.engine"


@dataclass(frozen=True)
class Same:
    """A reference to an object that is described elsewhere.

    Args:
        path: path in this tree, or the name of an object in another part of the state ("parameter layer.weight").
    """

    path: str


@dataclass(frozen=True)
class View:
    """A tensor in the memory of a parameter or buffer.

    Args:
        of: name of that tensor, as in `Same`.
        shape: of the view.
        strides: of the view, in elements.
        offset: of the view in that memory, in elements.
        dtype: name of its dtype if that tensor has another one, such as the real part of complex numbers.
    """

    of: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: str = ""


@dataclass
class Instance:
    """An object that is neither a plain value nor a container.

    Args:
        form: how it is described and restored, such as "object", "generator" or "function".
        kind: name of its class, or of a function, by `kind_text`.
        state: its content, to restore it from.
    """

    form: str
    kind: str
    state: dict[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.form, self.kind))


def instances_in(tree: Any, form: str, path: str = "") -> Iterator[tuple[str, Instance]]:
    """Yield the instances of `form` in a tree with their paths, except in keys and sets."""
    if isinstance(tree, Instance) and tree.form == form:
        yield path, tree
    if isinstance(tree, (dict, Instance)):
        for key, value in (tree.state if isinstance(tree, Instance) else tree).items():
            yield from instances_in(value, form, f"{path}/{key}")
    elif isinstance(tree, (list, tuple, deque)):
        for index, value in enumerate(tree):
            yield from instances_in(value, form, f"{path}/{index}")


def owners_of(path: str) -> Iterator[str]:
    """Yield `path` and the paths of the objects around its object."""
    yield path
    for end in ("/", " ("):
        at = path.find(end)
        while at > 0:
            yield path[:at]
            at = path.find(end, at + 1)


def step(path: str, key: object) -> str:
    """Return the path of the item `key` of the object at `path`."""
    return f"{path}/{key if isinstance(key, str) and key.isidentifier() else repr(key)}"


def key_path(path: str, index: int) -> str:
    """Return the path of a key of the dict at `path` by its index, as its text can change."""
    return f"{path} (key {index})"


def value_path(path: str, index: int) -> str:
    """Return the path of the value that belongs to that key."""
    return f"{path} (value {index})"


def kind_name(kind: type) -> str:
    """Return the name of a class in snapshots."""
    return kind_text(module_of(kind), kind.__qualname__)


def kind_text(module: str | None, name: str) -> str:
    """Return the name of a class or function in snapshots: "package.module:name".

    For those of the engine it is without the module, so that they can move.

    >>> kind_text("midstride.engine.callbacks", "EarlyStopping")
    'midstride.engine:EarlyStopping'
    """
    if not isinstance(module, str):  # code has set another value
        module = None
    return f"{_ENGINE if module and module.startswith(f'{_ENGINE}.') else module}:{name}"


def loaded(name: str) -> Any:
    """Return the loaded class or function called `name`, as of `kind_text`; None if unknown.

    It imports nothing: a snapshot cannot bring code into a process.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for inner in path.split("."):
        found = getattr(found, inner, None)
    return found
