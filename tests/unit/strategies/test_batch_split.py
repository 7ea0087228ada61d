"""Batches of every shape: moved, cut into parts, and what came out of the parts joined."""

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from midstride.engine.errors import UserError
from midstride.engine.strategies.batch_split import cut, join
from midstride.engine.trees import convert, move

X = torch.arange(6.0).view(3, 2)


class Named(NamedTuple):
    x: Any
    label: Any = None


@dataclass(frozen=True)
class Data:
    x: Any
    size: int = field(init=False, default=3)


class Graph:
    """An object that moves itself."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> "Graph":
        return Graph(self.x.to(device))


def made_default() -> defaultdict[str, Any]:
    made: defaultdict[str, Any] = defaultdict(list)
    made["x"] = X
    return made


#: a batch, and where its tensor is
SHAPES: dict[str, tuple[Any, Any]] = {
    "tensor": (X, lambda b: b),
    "dict": ({"x": X, "name": "a"}, lambda b: b["x"]),
    "ordered": (OrderedDict(x=X), lambda b: b["x"]),
    "default": (made_default(), lambda b: b["x"]),
    "user's dict": (UserDict(x=X), lambda b: b["x"]),
    "read only": (MappingProxyType({"x": X}), lambda b: b["x"]),
    "list": ([1, X], lambda b: b[1]),
    "tuple": ((X, None), lambda b: b[0]),
    "namedtuple": (Named(X, "a"), lambda b: b.x),
    "dataclass": (Data(X), lambda b: b.x),
    "object": (Graph(X), lambda b: b.x),
    "packed": (pack_sequence([torch.ones(2, 1)]), lambda b: b.data),
    "nested": ({"a": [Named({"x": Data([X])})]}, lambda b: b["a"][0].x["x"].x[0]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_moved_and_keeps_its_kind(shape: str) -> None:
    batch, tensor = SHAPES[shape]
    moved = move(batch, torch.device("meta"))
    assert type(moved) is type(batch)
    assert tensor(moved).device.type == "meta"
    assert tensor(batch).device.type == "cpu"
    assert move(batch, torch.device("cpu")) is batch
    doubled = convert(batch, lambda t: t.double())
    assert shape in ("object", "packed") or tensor(doubled).dtype == torch.float64


def test_a_batch_is_cut_as_torch_cuts() -> None:
    batch = {"x": torch.arange(30), "texts": [str(i) for i in range(30)], "scale": torch.tensor(2.0), "name": "a"}
    parts = cut(Named(batch, Data(torch.zeros(30))), 4)
    assert [len(part.x["x"]) for part in parts] == [8, 8, 8, 6]
    assert [len(part.x["texts"]) for part in parts] == [8, 8, 8, 6]
    assert [len(part.label.x) for part in parts] == [8, 8, 8, 6]
    assert torch.equal(torch.cat([part.x["x"] for part in parts]), batch["x"])
    assert all(part.x["name"] == "a" and part.x["scale"] == 2 for part in parts)
    assert [len(part) for part in cut(torch.zeros(3), 4)] == [1, 1, 1]
    uneven = {"few": torch.zeros(2), "many": torch.zeros(5)}
    assert cut(uneven, 1) == [uneven]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((torch.zeros(4), {"y": torch.zeros(3)}), [r"batch\[0\] has 4", r"batch\[1\]\['y'\] has 3"]),
        ((torch.zeros(4), Graph(X)), ["Graph", "dataclass", "ddp"]),
        (pack_sequence([torch.ones(2, 1)]), ["PackedSequence"]),
        ([1, 2], ["without tensors"]),
    ],
)
def test_what_cannot_be_cut_is_named(batch: Any, words: list[str]) -> None:
    for word in words:
        with pytest.raises(UserError, match=word):
            cut(batch, 2)


def test_outputs_of_parts_are_joined() -> None:
    parts = [{"loss": torch.tensor(float(i)), "logits": torch.full((2, 3), float(i)), "n": i} for i in range(3)]
    joined = join(parts)
    assert joined["loss"].tolist() == [0.0, 1.0, 2.0]
    assert joined["logits"].shape == (6, 3)
    assert joined["n"].tolist() == [0, 1, 2]
    assert join([None, None]) is None
    assert join(["a", "b"]) == ["a", "b"]
    assert join([Named(torch.zeros(1)), Named(torch.ones(1))]).x.tolist() == [0.0, 1.0]
    with pytest.raises(UserError, match="NoneType, Tensor"):
        join([torch.zeros(1), None])


def test_packed_sequences_are_recognised() -> None:
    assert isinstance(move(pack_sequence([X]), torch.device("meta")), PackedSequence)
