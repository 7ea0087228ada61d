"""When the watch over unsaved state looks, and that it speaks once."""

import pytest

from midstride.engine.training.checkpointing.unsaved_state import UnsavedStateMonitor


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
