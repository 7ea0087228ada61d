"""Nests: how many samples are in a batch of any kind, its leaves by name, and a map over one tree or several."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from midstride.engine.trees import is_state_leaf, map_leaves, named_leaves, other_length, samples_in


class Graph:
    """A batch of graphs, as PyG and DGL have it."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def to(self, device: Any) -> "Graph":
        return self

    def __repr__(self) -> str:
        return f"Graph({self.batch_size})"


Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Sample:
    texts: list[str]
    x: Tensor = field(default_factory=lambda: torch.zeros(3, 2))


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(3, 2), 3),
        (torch.zeros(()), 1),
        ([torch.zeros(3), torch.zeros(5)], 3),
        (Pair(torch.zeros(3), None), 3),
        ({"texts": ["a", "b", "c"], "x": torch.zeros(3)}, 3),
        ([["a", "b", "c"], {"x": [torch.zeros(3)]}], 3),
        (UserDict(x=torch.zeros(3)), 3),
        (Sample(["a", "b", "c"]), 3),
        ([{}, Sample([])], 3),
        ([pack_sequence([torch.zeros(3), torch.zeros(2)])], 2),
        (torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)], layout=torch.jagged), 2),
        ({"graph": Graph(2), "x": torch.zeros(7)}, 2),
        ({"epoch": torch.tensor(4), "x": np.zeros((3, 2))}, 3),
        ({"texts": ["a", "b", "c"], "labels": [0, 1, 0]}, 3),
        ({"input_ids": [[1, 2, 3], [1, 2]], "labels": [0, 1]}, 2),
        ([{"text": "a", "tags": ["b"] * 5}] * 4, 4),
        ([(["a", "b", "c"], 1)] * 4, 1),
        ({"mean": np.zeros(3), "x": torch.zeros(8, 1)}, 8),
        ({"x": torch.zeros(0, 4), "classes": ["a", "b", "c"]}, 1),
        ([torch.zeros(0, 4), torch.zeros(0)], 1),
        (SimpleNamespace(name="n", x=torch.zeros(3)), 3),
        ([], 1),
        ("text", 1),
        (None, 1),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else type(value).__name__,
)
def test_the_form_of_a_batch_tells_its_samples(batch: Any, samples: int) -> None:
    assert samples_in(batch) == samples


@pytest.mark.parametrize(
    ("batch", "other"),
    [
        ([torch.zeros(4, 2), torch.zeros(4)], None),
        ([torch.zeros(4, 2), {"y": torch.zeros(3)}], 3),
        ({"x": torch.zeros(4, 1), "camera": np.eye(3)}, None),
        ([np.zeros(4), np.zeros(3)], 3),
        (Graph(3), None),
    ],
)
def test_a_tensor_of_another_length_is_found(batch: Any, other: int | None) -> None:
    assert other_length(batch, 4) == other


def test_leaves_are_named_as_code_reaches_them() -> None:
    nest = {"x": [1, Pair(2, 3)], "s": Sample(["a"])}
    assert [path for path, _ in named_leaves(nest, "b")] == [
        *("b['x'][0]", "b['x'][1].x", "b['x'][1].y"),
        *("b['s'].texts[0]", "b['s'].x"),
    ]


def test_trees_are_mapped_by_key_into_the_kinds_of_the_first() -> None:
    first, second = {"a": 1, "b": (2, [3])}, OrderedDict(b=[20, [30]], a=10)
    assert map_leaves(lambda x, y: x + y, first, second) == {"a": 11, "b": (22, [33])}
    with pytest.raises(ValueError, match="zip"):
        map_leaves(lambda x, y: x, [1, 2], [1])


def test_in_a_state_tree_derived_classes_are_leaves() -> None:
    assert map_leaves(type, [Pair(1, 2), {"d": UserDict()}], is_leaf=is_state_leaf) == [Pair, {"d": UserDict}]
    assert map_leaves(type, [Pair(1, 2)]) == [Pair(int, int)]
