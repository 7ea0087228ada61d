"""Arrays that came to share memory in training are named where training writes into them, and no others are."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from midstride.engine.objects.walk import GraphWalk
from midstride.engine.objects.watch import UnwritableWarnings

Attributes = dict[str, Any]


def walk(attributes: Attributes) -> GraphWalk:
    walked = GraphWalk({}, {})
    walked.attributes(attributes, "module")
    return walked


def columns(array: Any) -> Attributes:
    return {"x": array[:, 0], "y": array[:, 1]}


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


#: what training makes of the array there is, whether it writes into it, whether that is named
ROWS: dict[str, tuple[Callable[[Any], Attributes], bool, bool]] = {
    "a view": (lambda array: {"array": array, "part": array[1:]}, True, True),
    "two views": (lambda array: {"x": array[:2], "y": array[1:]}, True, True),
    "a view in a list": (lambda array: {"array": array, "parts": [array[1:]]}, True, True),
    "a tensor of it": (lambda array: {"array": array, "tensor": torch.from_numpy(array)}, True, True),
    "a view that is read": (lambda array: {"array": array, "part": array[1:]}, False, False),
    "two of many views": (lambda array: {"views": [array[0], array[1], array[2], array[1:, 1]]}, True, True),
    "rows": (lambda array: {"rows": [*array]}, True, False),
    "columns": (columns, True, False),
    "itself": (lambda array: {"array": array, "again": array}, True, False),
    "a copy": (lambda array: {"array": array, "copy": array.copy()}, True, False),
    "read only": (lambda array: {"x": read_only(array[:2]), "y": read_only(array[1:])}, True, False),
}


@pytest.mark.parametrize("name", ROWS)
def test_arrays_that_come_to_share_memory_are_named_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    made, writes, is_named = ROWS[name]
    array = np.zeros((3, 2))
    named = UnwritableWarnings()
    named.begin(walk({"array": array}))
    for _ in range(3):
        named.warn(walk(made(array)))
        array += writes
    assert len(caplog.messages) == is_named


def other_half(number: int, memory: Any) -> Any:
    return memory[number % 2 * 2 :][:2]


#: what holds memory, what training sees of it at a step, and another array at the same place
MOVING: dict[str, Callable[[int, Any], Attributes]] = {
    "an array": lambda number, array: {"array": array, "part": other_half(number, array)},
    "a tensor of an array": lambda number, array: {
        "array": array,
        "part": other_half(number, torch.from_numpy(array[number % 2 :])),
    },
    "an array of a tensor": lambda number, tensor: {"whole": tensor, "part": other_half(number, tensor.numpy())},
    "two that change places": lambda number, array: {
        "array": array,
        "x": other_half(number, array),
        "y": other_half(number + 1, array),
    },
    "two that move together": lambda number, array: {"x": array[number:][:2], "y": array[number + 1 :][:1]},
    "a longer and longer part": lambda number, array: {"x": array[: number + 2], "y": array[number + 1 :][:1]},
}


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize("writes", [False, True])
def test_a_view_that_moves_is_named_once_if_its_memory_changes(
    name: str, writes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    memory: Any = torch.zeros(9) if name == "an array of a tensor" else np.zeros(9)
    named = UnwritableWarnings()
    named.begin(walk(MOVING[name](0, memory)))
    for number in range(1, 5):
        memory += int(writes)
        named.warn(walk(MOVING[name](number, memory)))
    assert len(caplog.messages) == writes


@pytest.mark.parametrize("writes", [False, True])
def test_a_cache_of_rows_is_named_once_where_it_is_written_to(writes: bool, caplog: pytest.LogCaptureFixture) -> None:
    array, rows = np.zeros((9, 2)), []
    named = UnwritableWarnings()
    named.begin(walk({"array": array}))
    for row in array:
        rows.append(row)
        row += writes
        named.warn(walk({"array": array, "rows": rows}))
    assert len(caplog.messages) == writes


def test_what_every_attempt_builds_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    array = np.zeros(3)
    attributes = {"array": array, "part": array[1:]}
    named = UnwritableWarnings()
    named.begin(walk(attributes))
    for _ in range(2):
        array += 1
        named.warn(walk(attributes))
    assert caplog.messages == []
