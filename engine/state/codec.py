"""The codec: encodes a tree of state as JSON and named tensors. It never uses pickle.

JSON alone would silently change a state: it turns int keys into text and tuples into lists, and has no infinity. So
other types are encoded as objects with a tag: `{"$": "tuple", "items": [...]}`. Values of types without a tag are
refused in one error that names all their paths.
"""

import base64
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from midstride.engine.errors import UnsupportedState
from midstride.engine.formatting import format_count
from midstride.engine.state.arrays import array_of, describe_dtype, dtype_of, scalar_of, tensor_of
from midstride.engine.state.dtypes import torch_dtype
from midstride.engine.state.hash_table import described_table, fill_set
from midstride.engine.state.object_nodes import Instance, Same, View
from midstride.engine.state.row_shards import RowShard
from midstride.engine.state.shared_containers import AGAIN, SharedContainers
from midstride.engine.state.tensor_blocks import TensorBlocks
from midstride.engine.state.tensors import Leaves, other_kind, rebuild, stage
from midstride.engine.state.torch_internals import indices_and_values

__all__ = ["FACTORIES", "Encoded", "StoredTensors", "decode", "encode", "encode_lazily", "is_writable", "tensors_of"]

_TAG = "$"
_PLAIN = frozenset({type(None), bool, int, str})
_TEXT = frozenset({str})
_SCALARS = _PLAIN | {float}
#: name in a document -> factory of a defaultdict
FACTORIES: dict[str | None, Any] = {
    kind.__name__: kind for kind in (int, float, complex, bool, str, bytes, list, tuple, dict, set, deque, Counter)
} | {None: None}


@dataclass(frozen=True)
class Encoded:
    """An encoded copy of a tree.

    Args:
        document: what `json` can write and read back.
        tensors: copies on the CPU, by readable name; the originals may change at once.
    """

    document: Any
    tensors: dict[str, Tensor]


def node_at(root: Any, place: list[str | int]) -> Any:
    """Return the node of the document `root` at `place`."""
    for key in place:
        root = root[key]
    return root


def encode_lazily(tree: object, blocks: TensorBlocks | None = None) -> tuple[Any, Leaves]:
    """Return the document of `tree` and the tensors in it, which are not copied yet.

    Args:
        tree: a tree of state.
        blocks: dicts of tensors of an earlier encoding, which are used again and updated.

    Raises:
        UnsupportedState: it holds values that cannot be written; all their paths are named.
    """
    encoder = _Encoder(blocks)
    document = encoder.value(tree, "")
    if encoder.faults:
        raise UnsupportedState(unwritable(encoder.faults))
    encoder.shared.complete(document)
    return document, encoder.leaves


def is_writable(value: object) -> bool:
    """Return whether `encode` takes `value`."""
    if _is_surely_writable(value):
        return True
    try:
        encode_lazily(value)
    except UnsupportedState:
        return False
    return True


def _is_surely_writable(value: Any) -> bool:
    """Return whether `value` is or holds what `encode` takes and would copy."""
    kind = type(value)
    if kind is dict and not {*map(type, value)} <= {int, str}:
        return False
    items = value.values() if kind is dict else value if kind in (list, tuple) else [value]
    others = [item for item in items if type(item) not in _SCALARS and type(item) is not Tensor]
    return all(type(item) is np.ndarray and item.dtype.kind in "biufc" for item in others)


def encode(tree: object) -> Encoded:
    """Return an encoded copy of `tree`; raises as `encode_lazily` does."""
    document, leaves = encode_lazily(tree)
    return Encoded(document, stage(leaves))


def decode(
    document: Any,
    tensors: Mapping[str, Tensor],
    shards: Mapping[int, RowShard | Tensor] | None = None,
    parts: Collection[str] | None = None,
) -> Any:
    """Return the tree given to `encode`: same types, bits, strides and sharing, on the CPU.

    Args:
        document: of the tree.
        tensors: by name, as `encode` returned them; only those of `parts` are needed.
        shards: by the id of its node in the document: what to put there instead of the written row shard.
        parts: keys of a dict; the others of the tree are left out.
    """
    decoder = _Decoder(document, tensors, shards or {}, parts)
    if parts is None:
        return decoder.value(document)
    return {name: decoder.value(node) for name, node in document.items() if name in parts}


def tensors_of(document: Any, parts: Collection[str] | None = None) -> "StoredTensors":
    """Return the tensors that decoding `parts` of the tree needs, and all its row shards."""
    found = StoredTensors(document, parts)
    if parts is None:
        found.meet(document, ())
    else:
        for name, node in document.items():
            found.meet(node, (name,), is_wanted=name in parts)
    return found


@dataclass
class StoredTensors:
    """The tensors that a document names.

    Args:
        document: of a tree.
        parts: keys of that tree; tensors of the others are left out. None for all.
        names: of tensors in these parts, without the rows of row shards.
        shards: nodes of the row shards of all parts, by their places.
    """

    document: Any
    parts: Collection[str] | None
    names: dict[str, None] = field(default_factory=dict)
    shards: dict[tuple[str | int, ...], dict[str, Any]] = field(default_factory=dict)
    _followed: set[int] = field(default_factory=set)

    def meet(self, node: Any, place: tuple[str | int, ...], *, is_wanted: bool = True) -> None:
        """Add the tensors in the node at `place`; if it is not wanted, its row shards alone."""
        tag = node.get(_TAG) if isinstance(node, dict) else None
        if tag == "piece":
            self.shards[place] = node
        elif tag == "tensor" and is_wanted:
            self.names[node["name"]] = None
        elif tag == AGAIN and is_wanted:
            self._follow(node["at"])
        elif tag not in ("tensor", AGAIN):
            for key, item in node.items() if isinstance(node, dict) else enumerate(node):
                if isinstance(item, (dict, list)):
                    self.meet(item, (*place, key), is_wanted=is_wanted)

    def _follow(self, place: list[str | int]) -> None:
        """Add the tensors of a container in a part that is left out."""
        node = node_at(self.document, place)
        if self.parts is not None and place[0] not in self.parts and id(node) not in self._followed:
            self._followed.add(id(node))
            self.meet(node, tuple(place))


@dataclass
class _Encoder:
    """One walk over a tree, which returns the document and collects tensors and faults."""

    blocks: TensorBlocks | None = None
    leaves: Leaves = field(default_factory=Leaves)
    faults: list[str] = field(default_factory=list)
    around: set[int] = field(default_factory=set)  # what the walk is inside of
    shared: SharedContainers = field(default_factory=SharedContainers)

    def value(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in _PLAIN or (kind is float and math.isfinite(value)):
            return value
        if kind is Tensor or kind is nn.Parameter:  # most of a state; it holds nothing else
            return _write_tensor(self, value, path)
        write = _WRITERS.get(kind) or (_write_scalar if issubclass(kind, np.generic) else None)
        if write is None:
            return self.fault(path, kind_of(value))
        if id(value) in self.around:
            return self.fault(path, f"{kind_of(value)} that contains itself")
        if (again := self.shared.again(value)) is not None:
            return again
        blocks = self.blocks if kind is dict or kind is OrderedDict else None
        document = None if blocks is None else blocks.again(path, value, self.leaves, self.shared)
        if document is None:
            start = len(self.leaves.tensors)
            self.around.add(id(value))
            document = write(self, value, path)
            self.around.discard(id(value))
            if blocks is not None:
                blocks.add(path, value, document, self.leaves.since(start), self.shared)
        self.shared.note(value, document)
        return document

    def items(self, values: Collection[Any], path: str) -> list[Any]:
        if _PLAIN.issuperset(map(type, values)):  # long ones there are: the state of `random` has 625 numbers
            return list(values)
        return [self.value(value, joined(path, index)) for index, value in enumerate(values)]

    def pairs(self, mapping: Mapping[Any, Any], path: str) -> list[list[Any]]:
        return [[self.key(key, path), self.value(value, joined(path, key))] for key, value in mapping.items()]

    def key(self, key: Any, path: str) -> Any:
        if isinstance(key, Tensor):
            return self.fault(path, "a tensor as a key: another process could not find it again")
        return self.value(key, f"{path} (a key)")

    def strided(self, tensor: Tensor, path: str) -> dict[str, Any]:
        """Return the entry of a strided tensor, to be completed by a layout."""
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        if not (tensor.is_cpu or tensor.is_cuda):
            tensor = tensor.detach().cpu()  # XLA's have no addresses, which tell what shares memory
        entry = {_TAG: "tensor", "dtype": _dtype_name(tensor.dtype), "shape": list(tensor.shape)}
        self.leaves.add(path, tensor, entry)
        return entry

    def fault(self, path: str, what: str) -> None:
        self.faults.append(f"{path or 'the whole'}: {what}")


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _write_float(encoder: _Encoder, value: float, path: str) -> Any:
    return {_TAG: "float", "value": repr(value) if math.isinf(value) else struct.pack(">d", value).hex()}


def _read_float(text: str) -> float:
    return float(text) if text in ("inf", "-inf") else float(struct.unpack(">d", bytes.fromhex(text))[0])


def _write_tensor(encoder: _Encoder, tensor: Tensor, path: str) -> Any:
    if tensor.grad_fn is not None:
        return encoder.fault(path, "a tensor with a gradient graph; keep its .detach() instead")
    if (kind := other_kind(tensor)) is not None:
        return encoder.fault(path, f"a {kind} tensor of {tensor.dtype}")
    if tensor.layout == torch.sparse_coo:
        entry: dict[str, Any] = {_TAG: "sparse", "shape": list(tensor.shape), "coalesced": tensor.is_coalesced()}
        indices, values = indices_and_values(tensor)
        entry["indices"] = encoder.strided(indices, joined(path, "indices"))
        entry["values"] = encoder.strided(values, joined(path, "values"))
    else:
        entry = encoder.strided(tensor, path)
    if type(tensor) is nn.Parameter:
        entry["parameter"] = True
    if tensor.requires_grad:
        entry["requires_grad"] = True
    return entry


def _write_dict(encoder: _Encoder, value: dict[Any, Any], path: str) -> Any:
    if _TAG not in value and _TEXT.issuperset(map(type, value)):
        if _PLAIN.issuperset(map(type, value.values())):
            return dict(value)
        return {key: encoder.value(item, joined(path, key)) for key, item in value.items()}
    return {_TAG: "dict", "pairs": encoder.pairs(value, path)}


def _write_defaultdict(encoder: _Encoder, value: defaultdict[Any, Any], path: str) -> Any:
    known = [name for name, factory in FACTORIES.items() if factory is value.default_factory]
    if not known:
        return encoder.fault(path, f"collections.defaultdict made by {kind_of(value.default_factory)}")
    return {_TAG: "defaultdict", "factory": known[0], "pairs": encoder.pairs(value, path)}


def _write_row_shard(encoder: _Encoder, value: RowShard, path: str) -> Any:
    return {_TAG: "piece", "start": value.start, "shape": list(value.shape), "rows": encoder.value(value.rows, path)}


def _write_array(encoder: _Encoder, value: np.ndarray[Any, Any], path: str) -> Any:
    dtype = describe_dtype(value.dtype)
    if dtype is None:
        return encoder.fault(path, f"numpy.ndarray of {value.dtype}")
    tensor, order = tensor_of(value)
    entry = {_TAG: "array", "dtype": encoder.value(dtype, path), "shape": list(value.shape), "order": order}
    return {**entry, "data": encoder.strided(tensor, path)}


def _write_scalar(encoder: _Encoder, value: np.generic, path: str) -> Any:
    dtype = describe_dtype(value.dtype)
    if dtype is None:
        return encoder.fault(path, f"{kind_of(value)} of {value.dtype}")
    return {_TAG: "scalar", "dtype": encoder.value(dtype, path), "bytes": value.tobytes().hex()}


def _write_view(encoder: _Encoder, value: View, path: str) -> Any:
    entry = {_TAG: "view", "of": value.of, "shape": [*value.shape], "strides": [*value.strides], "offset": value.offset}
    return {**entry, "dtype": value.dtype} if value.dtype else entry


def _write_instance(encoder: _Encoder, value: Instance, path: str) -> Any:
    state = encoder.value(value.state, path)
    return {_TAG: "instance", "form": value.form, "kind": value.kind, "state": state}


def _text(tag: str, text: Callable[[Any], Any]) -> Callable[[_Encoder, Any, str], Any]:
    return lambda encoder, value, path: {_TAG: tag, "value": text(value)}


def _items(tag: str) -> Callable[[_Encoder, Any, str], Any]:
    return lambda encoder, value, path: {_TAG: tag, "items": encoder.items(value, path)}


def _pairs(tag: str) -> Callable[[_Encoder, Any, str], Any]:
    return lambda encoder, value, path: {_TAG: tag, "pairs": encoder.pairs(value, path)}


def _write_set(encoder: _Encoder, value: set[Any], path: str) -> Any:
    return {_TAG: "set", "items": encoder.items(value, path), **described_table(value, list(value))}


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


_WRITERS: dict[type, Callable[[_Encoder, Any, str], Any]] = {
    float: _write_float,
    complex: lambda encoder, value, path: {_TAG: "complex", "items": encoder.items((value.real, value.imag), path)},
    bytes: _text("bytes", _base64),
    bytearray: _text("bytearray", _base64),
    list: lambda encoder, value, path: encoder.items(value, path),
    tuple: _items("tuple"),
    set: _write_set,
    frozenset: _items("frozenset"),
    deque: lambda encoder, value, path: {_TAG: "deque", "maxlen": value.maxlen, "items": encoder.items(value, path)},
    dict: _write_dict,
    OrderedDict: _pairs("OrderedDict"),
    Counter: _pairs("Counter"),
    defaultdict: _write_defaultdict,
    torch.Size: _text("Size", list),
    torch.dtype: _text("dtype", _dtype_name),
    torch.device: _text("device", str),
    np.ndarray: _write_array,
    RowShard: _write_row_shard,
    Same: lambda encoder, value, path: {_TAG: "same", "as": value.path},
    View: _write_view,
    Instance: _write_instance,
}


@dataclass
class _Decoder:
    """One walk over a document."""

    root: Any
    tensors: Mapping[str, Tensor]
    shards: Mapping[int, RowShard | Tensor]
    parts: Collection[str] | None = None
    memory: dict[str, Tensor] = field(default_factory=dict)
    made: dict[int, Any] = field(default_factory=dict)  # of each node of the document, by its address

    def value(self, node: Any) -> Any:
        made: Any
        if isinstance(node, list):
            made = [self.value(item) for item in node]
        elif not isinstance(node, dict):
            return node
        elif _TAG not in node:
            made = {key: self.value(item) for key, item in node.items()}
        else:
            made = _READERS[node[_TAG]](self, node)
        self.made[id(node)] = made
        return made

    def items(self, node: dict[str, Any]) -> Iterable[Any]:
        return map(self.value, node["items"])

    def pairs(self, node: dict[str, Any]) -> Iterable[tuple[Any, Any]]:
        return ((self.value(key), self.value(value)) for key, value in node["pairs"])

    def strided(self, node: dict[str, Any]) -> Tensor:
        return self.dressed(rebuild(node, self.tensors, self.memory), node)

    def sparse(self, node: dict[str, Any]) -> Tensor:
        indices, values = self.strided(node["indices"]), self.strided(node["values"])
        # Of the argument check_invariants torch 2.11 warns that it is not given.
        with torch.sparse.check_sparse_tensor_invariants():
            tensor = torch.sparse_coo_tensor(indices, values, node["shape"], is_coalesced=node["coalesced"])
        return self.dressed(tensor, node)

    def dressed(self, tensor: Tensor, node: dict[str, Any]) -> Tensor:
        if node.get("parameter"):
            return nn.Parameter(tensor, requires_grad=node.get("requires_grad", False))
        return tensor.requires_grad_() if node.get("requires_grad") else tensor

    def piece(self, node: dict[str, Any]) -> RowShard | Tensor:
        if (given := self.shards.get(id(node))) is not None:
            return given
        return RowShard(self.value(node["rows"]), node["start"], tuple(node["shape"]))

    def again(self, node: dict[str, Any]) -> Any:
        other = node_at(self.root, node["at"])
        if id(other) not in self.made and self.parts is not None and node["at"][0] not in self.parts:
            return self.value(other)  # in a part that is left out
        return self.made[id(other)]

    def set(self, node: dict[str, Any]) -> set[Any]:
        found: set[Any] = set()
        fill_set(found, list(self.items(node)), node.get("table"))
        return found

    def instance(self, node: dict[str, Any]) -> Instance:
        form, kind, state = node["form"], node["kind"], self.value(node["state"])
        if (type(form), type(kind), type(state)) != (str, str, dict):
            raise TypeError("an instance has a form, a kind and a state")
        return Instance(form, kind, state)

    def array(self, node: dict[str, Any]) -> np.ndarray[Any, Any]:
        dtype = dtype_of(self.value(node["dtype"]))
        return array_of(self.strided(node["data"]), dtype, node["shape"], node["order"])


_READERS: dict[str, Callable[[_Decoder, dict[str, Any]], Any]] = {
    "float": lambda decoder, node: _read_float(node["value"]),
    "complex": lambda decoder, node: complex(*decoder.items(node)),
    "bytes": lambda decoder, node: base64.b64decode(node["value"]),
    "bytearray": lambda decoder, node: bytearray(base64.b64decode(node["value"])),
    "tuple": lambda decoder, node: tuple(decoder.items(node)),
    "set": _Decoder.set,
    "frozenset": lambda decoder, node: frozenset(decoder.set(node)),
    "deque": lambda decoder, node: deque(decoder.items(node), node["maxlen"]),
    "dict": lambda decoder, node: dict(decoder.pairs(node)),
    "OrderedDict": lambda decoder, node: OrderedDict(decoder.pairs(node)),
    "Counter": lambda decoder, node: Counter(dict(decoder.pairs(node))),
    "defaultdict": lambda decoder, node: defaultdict(FACTORIES[node["factory"]], decoder.pairs(node)),
    "Size": lambda decoder, node: torch.Size(node["value"]),
    "dtype": lambda decoder, node: torch_dtype(node["value"]),
    "device": lambda decoder, node: torch.device(node["value"]),
    "tensor": _Decoder.strided,
    "sparse": _Decoder.sparse,
    "array": _Decoder.array,
    "piece": _Decoder.piece,
    AGAIN: _Decoder.again,
    "same": lambda decoder, node: Same(node["as"]),
    "view": lambda decoder, node: View(
        node["of"], tuple(node["shape"]), tuple(node["strides"]), node["offset"], node.get("dtype", "")
    ),
    "instance": _Decoder.instance,
    "scalar": lambda decoder, node: scalar_of(bytes.fromhex(node["bytes"]), dtype_of(decoder.value(node["dtype"]))),
}


def unwritable(faults: list[str]) -> str:
    """Return the message for values that cannot be written, each named with its path."""
    shown = [*faults[:20], *([f"and {len(faults) - 20} more"] if len(faults) > 20 else [])]
    return "\n  ".join([f"{format_count(len(faults), 'value')} of the state cannot be written:", *shown]) + (
        "\nGive whatever holds such a value a state_dict() that returns tensors and plain values only, "
        "and a load_state_dict() that rebuilds the rest."
    )


def joined(path: str, key: object) -> str:
    """Return the path of the item `key` of the value at `path`."""
    text = str(key)
    text = text if len(text) <= 80 else f"{text[:77]}..."
    return f"{path}/{text}" if path else text


def kind_of(value: object) -> str:
    """Return a value's class or a function's name for messages: `function digits.<lambda>`."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    own = getattr(value, "__qualname__", None)
    return f"{name} {getattr(value, '__module__', '?')}.{own}" if own else name
