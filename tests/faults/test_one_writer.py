"""Law 5: a world that wakes up after another has taken over changes nothing, finds out and stops."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from laws.lives import Setting, assert_alike, live
from support.flow_runs import wait_for

from midstride.engine.fault_injection import FaultPlan

SUPERSEDED = 75

WHERE = [
    (1, "forward", "every step"),  # at its next snapshot
    (1, "before_commit", "every step"),  # at this one
    (2, "snapshot_write", "plain"),
    (2, "validation", "epoch ends"),  # with the best weights at hand, long before its next snapshot
    (11, "after_step", "plain"),  # at its end
]


@pytest.mark.parametrize(("step", "phase", "layout"), WHERE)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_world_that_slept_while_another_took_over_stops(
    ranks: int, step: int, phase: str, layout: str, tmp_path: Path, undisturbed: Callable[[Setting], Path]
) -> None:
    setting = Setting(ranks=ranks, layout=layout)
    (tmp_path / "plan").mkdir()
    plan = FaultPlan(tmp_path / "plan").add("freeze", rank=0, step=step, phase=phase)
    codes: list[int] = []
    older = threading.Thread(target=lambda: codes.extend(live(setting, tmp_path, plan)))
    older.start()
    try:
        wait_for(plan.fired, "the older world to fall asleep")
        assert live(setting, tmp_path) == [0] * ranks
        # Hidden files are drafts, which are never read: the older world may have fallen asleep over one.
        there = [path for path in (tmp_path / "run").rglob("[!.]*") if path.is_file()]
        finished = {path: path.read_bytes() for path in there}
    finally:
        plan.wake()
        older.join()
    assert codes == [SUPERSEDED] * ranks
    assert_alike(tmp_path, undisturbed(setting))
    for path, data in finished.items():
        assert path.read_bytes() == data, f"{path} was changed by a world that was superseded"
