"""Differences in code and settings between this attempt and the first one of the run.

Both are descriptions of the same graph: the attributes of each object by name, and a text for each value by its path,
also in containers, closures and partials. A value that training has changed since is no setting: that of the
snapshot holds and nothing is said.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from midstride.engine.formatting import is_secret
from midstride.engine.objects.kinds.plain import PLAIN
from midstride.engine.objects.watch import shown
from midstride.engine.state.object_nodes import Instance, Same, View, key_path, step, value_path
from midstride.engine.state.tensor_digest import tensor_digest
from midstride.engine.state.torch_internals import indices_and_values

__all__ = ["Built", "CodeChange"]

_CODE = ("function", "method")
#: forms of nodes that hold no value
_NOT_HELD = ("opaque", "large", "memory map")
#: items of a container that are described one by one, and values of one attribute
_MOST_ITEMS, _MOST_VALUES = 1000, 10_000
#: number of values in the digest of a long container
_MOST_TOLD = 100_000
#: characters of a text, and elements of an array, that are shown
_LONG, _SHOWN = 100, 8
#: bytes of an array that is described
_LARGE_BYTES = 16 << 20


@dataclass
class Built:
    """Objects and values that an attempt has built.

    Args:
        names: path of an object -> its attributes.
        values: path -> text of the value there.
    """

    names: dict[str, list[str]] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)

    def add(self, nodes: Mapping[str, Any], path: str, *, is_setup: bool) -> None:
        """Add the attributes at `path`; only their names if each attempt sets them up again."""
        self.names |= dict(_names_in(nodes, path))
        if not is_setup:
            for name, node in nodes.items():
                self.values |= dict(islice(_values_in(node, f"{path}/{name}"), _MOST_VALUES))

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> "Built":
        """Return the content of `state` of a snapshot."""
        return cls(dict(state.get("names", {})), dict(state.get("values", {})))

    def state(self) -> dict[str, Any]:
        """Return the values for a snapshot."""
        return {"names": self.names, "values": self.values}


def _names_in(nodes: Mapping[str, Any], path: str) -> Iterator[tuple[str, list[str]]]:
    yield path, [*nodes]
    for name, node in nodes.items():
        yield from _names_inside(node, step(path, name))


def _names_inside(node: Any, path: str) -> Iterator[tuple[str, list[str]]]:
    if isinstance(node, Instance) and node.form in ("object", "tensor"):
        yield from _names_in(node.state.get("attributes", {}), path)
    else:
        for child, where in _items(node, path):
            yield from _names_inside(child, where)


def _values_in(node: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield path and text of a value and of the values in it."""
    if (text := _text(node)) is not None:
        yield path, text
    for child, where in _parts(node, path):
        yield from _values_in(child, where)


#: form of a node -> keys of its state that hold nodes by name, and keys that hold one
_NAMED_PARTS = {"object": ("attributes",), "function": ("attributes", "cells"), "partial": ("attributes",)}
_SINGLE_PARTS = {
    "object": ("items",),
    "function": ("__defaults__", "__kwdefaults__"),
    "partial": ("func", "args", "keywords"),
    "flipped tensor": ("of",),
    "proxy": ("of",),
    "block": ("maxlen",),
}


def _parts(node: Any, path: str) -> Iterator[tuple[Any, str]]:
    """Yield the nodes of attributes, closures, arguments and items, each with its path."""
    if not isinstance(node, Instance) or node.form in ("array", "dict", "named tuple"):
        yield from _items(node, path)
        return
    for group in _NAMED_PARTS.get(node.form, ()):
        yield from ((child, step(path, name)) for name, child in node.state.get(group, {}).items())
    yield from ((node.state[name], step(path, name)) for name in _SINGLE_PARTS.get(node.form, ()) if name in node.state)
    if node.form == "method":
        yield node.state["of"], step(path, "__self__")


def _items(node: Any, path: str) -> Iterator[tuple[Any, str]]:
    """Yield the nodes of the items of a container's node, each with its path."""
    if isinstance(node, Instance) and "keys" in node.state:
        for index, (key, value) in enumerate(zip(node.state["keys"], node.state["values"], strict=True)):
            yield from ((key, key_path(path, index)), (value, value_path(path, index)))
        return
    if isinstance(node, Instance):
        if "factory" in node.state:
            yield node.state["factory"], step(path, "default_factory")
        node = node.state.get("members", node.state.get("items"))
    if isinstance(node, deque):
        yield node.maxlen, step(path, "maxlen")
    if not isinstance(node, (dict, list, tuple, deque)) or len(node) > _MOST_ITEMS:
        return
    if isinstance(node, dict):
        yield from ((child, step(path, key)) for key, child in node.items())
    else:
        yield from ((child, f"{path}/{index}") for index, child in enumerate(node))


def _text(node: Any) -> str | None:
    """Return a text that tells the value of a node, without its parts; None if it has none."""
    if type(node) in PLAIN or isinstance(node, np.generic):
        return _short(repr(node))
    if isinstance(node, (Tensor, np.ndarray)):
        return _text_of_array(node)
    if isinstance(node, bytearray):
        return _short(repr(node))
    if isinstance(node, dict):
        long = f" {_digest_of(node.values())}" if len(node) > _MOST_ITEMS else ""
        return f"{type(node).__name__} of {_short(', '.join(map(str, node)))}{long}"
    if isinstance(node, (list, tuple, deque)):
        long = f" {_digest_of(node)}" if len(node) > _MOST_ITEMS else ""
        return f"{type(node).__name__} of {len(node)} items{long}"
    return _text_of_instance(node) if isinstance(node, Instance) else None


def _text_of_instance(node: Instance) -> str | None:
    state = node.state
    if node.form == "tensor":
        return _text(state["value"])
    if node.form == "enum":
        return f"{node.kind}.{state.get('name', state.get('value'))}"
    if node.form == "value":
        return _short(f"{node.kind.rpartition(':')[2]}({', '.join(map(repr, state['items']))})")
    if node.form == "set":
        items = state["members"] if "members" in state else state["items"]
        return _short(f"{{{', '.join(sorted(map(repr, items)))}}}")
    if node.form == "derived":
        return f"{node.kind} {_text(state['base'])}"
    if node.form in ("block", "derived array", "masked array", "reduced", "table"):
        return f"{node.kind} {_digest_of(state.values())}"
    return None if node.form in _NOT_HELD else node.kind


def _text_of_array(value: Any) -> str | None:
    if isinstance(value, Tensor) and value.layout == torch.sparse_coo:
        return f"sparse {list(value.shape)} {' '.join(map(str, map(_text_of_array, indices_and_values(value))))}"
    if isinstance(value, Tensor) and not (value.layout == torch.strided and value.is_cpu):
        return None
    size = value.numel() if isinstance(value, Tensor) else value.size
    kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if size <= _SHOWN:
        return f"{kind} {value.tolist()}"
    if value.nbytes > _LARGE_BYTES:
        return None
    if isinstance(value, Tensor):
        return f"{kind} {tensor_digest(value)[:16]}"
    return f"{kind} {xxhash.xxh3_64_hexdigest(np.ascontiguousarray(value).tobytes())}"


def _digest_of(nodes: Iterable[Any]) -> str:
    """Return one digest of the values in `nodes`; of many that are not plain, the first ones."""
    nodes = [*nodes]
    if PLAIN.issuperset(map(type, nodes)):
        return _digest(repr(nodes))
    texts = (text for node in nodes for _, text in _values_in(node, ""))
    return _digest(" ".join(islice(texts, _MOST_TOLD)))


def _short(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[: _LONG - 20]}... {_digest(text)}"


def _digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode(errors="surrogatepass"))


def _is_within(path: str, owners: tuple[str, ...]) -> bool:
    return any(path == owner or path.startswith(f"{owner}/") for owner in owners)


@dataclass
class CodeChange:
    """Differences between the objects built by this attempt and by the first one.

    Args:
        now: of this attempt.
        then: of the first attempt; empty if the snapshot did not record it.
        takes_settings: whether settings that differ are taken from this attempt.
    """

    now: Built = field(default_factory=Built)
    then: Built = field(default_factory=Built)
    takes_settings: bool = False
    #: attributes with a difference, as code writes them, by the words that tell what becomes of them
    found: dict[str, list[str]] = field(default_factory=dict)
    #: path -> text of the setting in force, and of the one that this attempt has built and that has no effect
    without_effect: dict[str, tuple[str, str]] = field(default_factory=dict)
    #: path -> texts then and now, of values that differ
    differing: dict[str, tuple[str, str]] = field(init=False)
    _taken: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Find the values that differ."""
        now = self.now.values
        self.differing = {
            path: (text, now[path]) for path, text in self.then.values.items() if now.get(path, text) != text
        }

    def adds(self, path: str, name: str) -> bool:
        """Return whether an attribute that the snapshot lacks is new in the code."""
        names, before = self.now.names.get(path, ()), self.then.names.get(path, ())
        is_new = bool(self.then.names) and name in names and name not in before
        return is_new and self._note("new, and as built", step(path, name) if path in self.then.names else path)

    def drops(self, path: str, name: str) -> bool:
        """Return whether an attribute that the snapshot holds was removed from the code."""
        names = self.now.names
        is_gone = path in names and name not in names[path] and name in self.then.names.get(path, ())
        return is_gone and self._note("gone, and dropped", step(path, name))

    def replaces(self, path: str, saved: Any) -> bool:
        """Return whether the value that this attempt has built replaces the snapshot's.

        A function does, because it is code, and any other value if settings are taken. Else the snapshot's holds, and
        the difference is recorded. Values that training has changed, and such as hold the same object, differ in peace.

        Args:
            path: the path of a value in `differing`.
            saved: its node in the snapshot.
        """
        then, now = self.differing[path]
        if isinstance(saved, (Same, View)) or _text(saved) != then:
            return False
        values = "" if is_secret(path) else f" ({then}, now {now})"
        if self.takes_settings or (isinstance(saved, Instance) and saved.form in _CODE):
            self._taken.add(path)
            return self._note("built otherwise, and the new one holds", path, values)
        self.without_effect[path] = then, now
        self._note("built otherwise, and the snapshot's holds", path, values)
        return False

    def lose(self, path: str) -> None:
        """Record in `found` that an object with attributes in the snapshot no longer exists."""
        self._note("gone, and dropped", path)

    def _note(self, what: str, path: str, values: str = "") -> bool:
        """Record the attribute at `path` under `what` in `found`; return True."""
        lines = self.found.setdefault(what, [])
        if (line := shown(path) + values) not in lines:
            lines.append(line)
        return True

    def after(self, saved: Mapping[str, Any]) -> Built:
        """Return the values with which the next attempt is compared.

        `saved` are the attributes of the snapshot by path. Attributes that training set are left out, even if
        this attempt builds them, from an object trained before.
        Settings are those of the first attempt, until new ones are taken.
        """
        then = self.then.names
        late = {(path, name) for path, names in saved.items() for name in names if name not in then.get(path, {name})}
        names = {path: [name for name in built if (path, name) not in late] for path, built in self.now.names.items()}
        kept = {path: text for path, (text, _) in self.differing.items() if path not in self._taken}
        own = tuple(f"{path}/{name}" for path, name in late)
        values = {**self.now.values, **kept}
        if own:
            values = {path: text for path, text in values.items() if not _is_within(path, own)}
        return Built(names, values)
