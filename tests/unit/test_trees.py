"""Nests: how many samples are in a batch of any kind."""

from collections import UserDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from midstride.engine.trees import samples_in

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
        ([], 1),
        ("text", 1),
        (None, 1),
    ],
    ids=repr,
)
def test_the_first_tensor_says_how_many_samples_a_batch_has(batch: Any, samples: int) -> None:
    assert samples_in(batch) == samples
