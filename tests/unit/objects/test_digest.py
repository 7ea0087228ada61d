"""What a digest tells apart that holds nothing: code, and what is made of it."""

import operator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from midstride.engine.objects.digest import digest_lines, users_lines


class Shape:
    def area(self) -> int:
        return 1

    def rim(self) -> int:
        return 2


SHAPE = Shape()
PAIRS: dict[str, tuple[Any, Any]] = {
    "a class": (nn.ReLU, nn.GELU),
    "a built-in": (max, min),
    "one of torch's": (torch.relu, torch.tanh),
    "one of Python": (nn.functional.relu, nn.functional.gelu),
    "one of numpy's": (np.add, np.multiply),
    "one of a class": (str.upper, str.lower),
    "a method": (SHAPE.area, SHAPE.rim),
    "what a partial calls": (partial(max, 1), partial(min, 1)),
    "what it gives": (partial(max, 1), partial(max, 2)),
    "a method that a partial calls": (partial(SHAPE.area), partial(SHAPE.rim)),
    "a getter": (operator.itemgetter(1), operator.itemgetter(2)),
    "a module": (torch.nn, torch.optim),
    "a dtype": (torch.float32, torch.float16),
    "a device": (torch.device("cpu"), torch.device("meta")),
    "one of numpy": (np.dtype("f4"), np.dtype("f8")),
    "a generic": (list[int], list[str]),
}


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("lines", [digest_lines, users_lines])
def test_another_function_class_or_type_is_seen(lines: Any, kind: str) -> None:
    one, other = (lines("global", {"act": value}) for value in PAIRS[kind])
    assert one == lines("global", {"act": PAIRS[kind][0]})
    assert one != other
