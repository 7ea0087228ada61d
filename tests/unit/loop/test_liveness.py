"""Which variables a loop carries from one iteration to the next, by its bytecode."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from midstride.engine.loop.liveness import loop_variables

pytestmark = pytest.mark.fast


def summed(loader: Any) -> float:
    total = 0.0
    for x in loader:
        y = x + 1
        total += y
    return total


def read_after(loader: Any) -> float:
    for x in loader:
        loss = x + 1
    return float(loss)


def best_of(loader: Any) -> float:
    best = 0.0
    for x in loader:
        if x > best:
            best = x
    return best


def ahead(loader: Any) -> Any:
    before = None
    for x in loader:
        if before is not None:
            yield before
        before = x
    yield before


def nested(loader: Any, inner: Any) -> float:
    for _ in loader:
        for x in inner:
            loss = x
        print(loss)
    return 0.0


def nested_twice(loader: Any, inner: Any) -> float:
    for _ in loader:
        for x in inner:
            for y in x:
                loss = y
        print(loss)
    return 0.0


def left_early(loader: Any, inner: Any) -> float:
    loss = 0.0
    for _ in loader:
        for x in inner:
            for y in x:
                if y is None:
                    break
                loss = y
        print(loss)
    return 0.0


def listed(loader: Any) -> Any:
    scale = 1
    for x in loader:
        y = [scale * one for one in x]
        scale = len(y)
    return y


def hidden(loader: Any) -> Any:
    one, other = 1, 2
    for x in loader:
        y = [one + other for one in x for other in x]
        one += len(y)
    return one, other


def counted(loader: Any) -> Any:
    count = 0

    def more() -> None:
        nonlocal count
        count += 1

    for _ in loader:
        more()
        print(count)


@pytest.mark.parametrize(
    ("function", "carried", "after"),
    [
        (summed, {"total"}, set()),
        (read_after, set(), {"loss"}),
        (best_of, {"best"}, set()),
        (ahead, {"before"}, set()),
        (nested, {"inner"}, set()),
        (nested_twice, {"inner"}, set()),
        (left_early, {"inner", "loss"}, set()),
        (listed, {"scale"}, {"y"}),
        (hidden, {"one", "other"}, set()),
        (counted, {"count", "more"}, set()),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_carried_and_read_after(function: Callable[..., Any], carried: set[str], after: set[str]) -> None:
    import dis

    first = next(one for one in dis.get_instructions(function) if one.opname == "FOR_ITER")
    code = inspect.unwrap(function).__code__
    found = loop_variables(code, first.offset)
    assert found.carried & {*code.co_varnames, *code.co_cellvars} - {"loader"} == carried
    assert found.read_after == after
