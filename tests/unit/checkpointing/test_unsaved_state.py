"""When the watch over unsaved state looks, what it sees, and that it speaks once of each change."""

import array
import ctypes
import itertools
import multiprocessing
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from midstride.engine.checkpointing.unsaved_state import UnsavedStateMonitor


@pytest.mark.parametrize(
    ("changes_before", "is_named_at"), [(1, 1), (3, 3), (5, 5), (6, 8), (9, 16), (17, 32), (600, 1024)]
)
def test_a_change_is_named_once_at_the_next_look(
    changes_before: int, is_named_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    held = {"calls": 0}
    monitor = UnsavedStateMonitor(lambda: iter([("global CALLS", held)]))
    named_at = []
    for snapshot in range(1, 2 * is_named_at + 1):
        held["calls"] += snapshot >= changes_before
        monitor.check()
        named_at += [snapshot] * len(caplog.records)
        caplog.clear()

    assert named_at == [is_named_at]


def test_between_looks_nothing_is_read() -> None:
    looks = []
    monitor = UnsavedStateMonitor(lambda: iter([("look", looks.append(None))]))
    for _ in range(1000):
        monitor.check()

    assert len(looks) == 1 + 5 + 7  # when training begins, at the first snapshots, and at 8, 16 ... 512


def test_code_of_an_object_made_in_training_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    held: dict[str, Any] = {"global a.x": 0, "function a": len}
    monitor = UnsavedStateMonitor(lambda: iter(held.items()))
    held |= {"function helper": len, "function Late.step": len, "class Late: step": len, "function a: calls": 1}
    monitor.check()

    assert caplog.text.count("missing, now") == caplog.text.count("function a: calls (missing, now 1)") == 1


def test_what_changes_later_is_named_then(caplog: pytest.LogCaptureFixture) -> None:
    held = {f"global {name}": [0] for name in range(12)}
    monitor = UnsavedStateMonitor(lambda: iter(held.items()))
    named = []
    for changing in ([0], [0, 3], [0, *range(1, 12)], []):
        for name in changing:
            held[f"global {name}"][0] += 1
        monitor.check()
        named.append(sum(record.getMessage().count("[0] (0, now ") for record in caplog.records))
        caplog.clear()

    assert named == [1, 1, 10, 0]


def test_a_function_that_a_library_loads_late_is_no_change(caplog: pytest.LogCaptureFixture) -> None:
    held = {"library function one.known": "one:known"}
    monitor = UnsavedStateMonitor(lambda: iter(held.items()))
    held["library function one.late"] = "one:late"
    monitor.check()
    assert caplog.messages == []

    held["library function one.late"] = "mine:other"
    monitor.check()
    assert len(caplog.messages) == 1


def test_late_imports_change_if_they_differ_from_their_import(caplog: pytest.LogCaptureFixture) -> None:
    held: dict[str, Any] = {"global first.X": 0}
    monitor = UnsavedStateMonitor(lambda: iter(held.items()))
    held |= {"global second.X": [0], "class Second: x": 0, "global first.Y": 1}
    monitor.check()
    held["global second.X"].append(1)
    monitor.check()

    first, second = (record.getMessage() for record in caplog.records)
    assert "no snapshot: global first.Y (missing, now 1). If" in first
    assert "global second.X holds ('1 items', now '2 items'), [1] (missing, now 1). " in second


def test_each_path_is_named_in_the_epoch_in_which_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    held = {"p": 0, "q": 0}
    monitor = UnsavedStateMonitor(lambda: iter([("data.training", held)]))
    for epoch in range(20, 24):
        held["p" if epoch < 22 else "q"] += 1
        for _ in range(40):
            monitor.check(epoch)

    assert [text.partition(": ")[2].partition(" ")[0] for text in caplog.messages] == [
        "data.training['p']",
        "data.training['q']",
    ]


def test_what_reading_changes_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    held: dict[str, Any] = {"cache": {}, "reads": 0, "p": 0}
    monitor = UnsavedStateMonitor(lambda: iter([("data.training", held)]))
    for index in range(5):
        with monitor.reading():
            held["cache"][index] = held["reads"] = index + 1
        held["p"] += index == 3
        monitor.check()
    held["cache"]["late"] = 0
    monitor.check()

    told = [text.partition(": ")[2].partition(". If")[0] for text in caplog.messages]
    assert told == ["data.training['p'] (0, now 1)"]


def numbered() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        yield number


class Node:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


def local() -> Any:
    made = threading.local()
    made.calls = 0
    return made


#: what is held -> how it is made, and how code counts in it
HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "count": (itertools.count, next),
    "cycle": (lambda: itertools.cycle([1, 2, 3]), next),
    "chain": (lambda: itertools.chain([1, 2], [3]), next),
    "enumerate": (lambda: enumerate([1, 2]), next),
    "zip": (lambda: zip([1, 2], [3, 4], strict=True), next),
    "generator": (numbered, next),
    "queue": (queue.Queue, lambda held: held.put(1)),
    "simple queue": (queue.SimpleQueue, lambda held: held.put(1)),
    "deque": (lambda: deque([1, 2]), lambda held: held.rotate()),
    "value": (lambda: multiprocessing.Value("i", 1), lambda held: setattr(held, "value", 2)),
    "ctype": (lambda: ctypes.c_int(1), lambda held: setattr(held, "value", 2)),
    "local": (local, lambda held: setattr(held, "calls", 1)),
    "event": (threading.Event, lambda held: held.set()),
    "array": (lambda: array.array("d", [1.0]), lambda held: held.append(2.0)),
    "bytes": (lambda: bytearray(3), lambda held: held.append(1)),
    "set": (lambda: set(range(9)), lambda held: (held.remove(3), held.add(9))),
    "items": (lambda: dict.fromkeys(range(2000), 0), lambda held: held.update({1999: 1})),
    "many": (lambda: [Node(1)] * 2000, lambda held: held.append(Node(1))),
    "objects": (lambda: np.array([None, [1]], dtype=object), lambda held: held[1].append(2)),
    "decimal": (lambda: [Decimal(1)], lambda held: held.append(held.pop() + 1)),
    "function": (lambda: [numbered], lambda held: held.append(held.pop() and local)),
    "nested": (lambda: Node({"a": Node([{"b": 1}])}), lambda held: held.inner["a"].inner[0].update(b=2)),
    "tensor": (lambda: torch.zeros(3), lambda held: held.add_(1)),
}


@pytest.mark.parametrize("kind", HELD)
def test_a_change_is_seen_in(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    make, change = HELD[kind]
    held = make()
    monitor = UnsavedStateMonitor(lambda: iter([("global X", held)]))
    monitor.check()
    assert caplog.records == []
    change(held)
    monitor.check()

    assert len(caplog.records) == 1


class _OfLibrary:
    """A data set as those of libraries, which keep the epoch in a tensor that workers share."""

    def __init__(self) -> None:
        self._epoch, self.level = torch.tensor(0), 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch += epoch - self._epoch + self.level  # what it reads is watched


def test_what_set_epoch_sets_is_no_change(caplog: pytest.LogCaptureFixture) -> None:
    data = _OfLibrary()
    monitor = UnsavedStateMonitor(lambda: iter([("data.training", data)]))
    data.set_epoch(1)
    monitor.check()
    assert caplog.text == ""
    data.level = 1
    monitor.check()
    assert "data.training.level (0, now 1). If" in caplog.text
