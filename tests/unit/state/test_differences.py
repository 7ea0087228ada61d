"""Where two trees of state differ."""

import math
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from midstride.engine.state.differences import differences

DIFFERENT: dict[str, tuple[Any, Any, str]] = {
    "value": (1, 2, "x (1, now 2)"),
    "type": (1, 1.0, "x (1, now 1.0)"),
    "bool": (True, 1, "x (True, now 1)"),
    "sign": (0.0, -0.0, "x (0.0, now -0.0)"),
    "sequence": ([1], (1,), "x (list [1], now tuple (1,))"),
    "length": ([1], [1, 2], "x (1 items, now 2 items)"),
    "maxlen": (deque([1], 2), deque([1], 3), "x (maxlen 2, now maxlen 3)"),
    "missing": ({"a": 1}, {}, "x/a (1, now missing)"),
    "more": ({}, {"a": 1}, "x/a (missing, now 1)"),
    "dtype": (torch.ones(2), torch.ones(2).half(), "x (float32[2], now float16[2])"),
    "shape": (torch.ones(2), torch.ones(2, 1), "x (float32[2], now float32[2, 1])"),
    "zero": (torch.tensor(0.0), torch.tensor(-0.0), "x (float32[] 0.0, now float32[] -0.0)"),
    "bits": (torch.tensor([1, 2]), torch.tensor([1, 3]), "x (int64[2], now int64[2])"),
    "array": (np.ones(2), np.zeros(2), "x (float64[2], now float64[2])"),
}


@pytest.mark.parametrize("name", list(DIFFERENT))
def test_a_difference_is_named_with_both_values(name: str):
    left, right, words = DIFFERENT[name]
    assert differences({"x": left}, {"x": right}) == [words]


def test_nan_strides_and_order_of_keys_make_no_difference():
    nan = torch.tensor([math.nan, 1.0])
    assert differences({"a": nan, "b": math.nan}, {"b": math.nan, "a": nan.clone()}) == []
    assert differences(torch.arange(4).reshape(2, 2).t().contiguous(), torch.arange(4).reshape(2, 2).t()) == []
