"""Law 5: a world that wakes up after another has taken over changes nothing, finds out and stops."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from laws.lives import Setting, assert_alike, live
from support.flow_runs import wait_for
from support.fork_server import run_program

from midstride.engine.fault_injection import FaultPlan
from midstride.engine.processes.lifetime import is_suspended

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
    plan = FaultPlan(tmp_path / "plan").add("freeze", rank=0, step=step, phase=phase)
    codes: list[int] = []
    older = threading.Thread(target=lambda: codes.extend(live(setting, tmp_path, plan)))
    older.start()
    try:
        mark = tmp_path / "plan" / "fired-000"
        wait_for(lambda: plan.fired() and is_suspended(int(mark.read_text() or 0)), "the older world to fall asleep")
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


SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader
from midstride.engine import Trainer, TrainingModule
from midstride.engine.snapshots.lease import acquire
from midstride.engine.storage.store import Store

class Overtaken(TrainingModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        if self.global_step == 2 and self.trainer.world.is_first:
            acquire(Store.open(sys.argv[1]), None, {})
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

Trainer(devices=2, max_epochs=1, snapshots={"every_steps": 1}).fit(
    Overtaken(), DataLoader(torch.ones(20, 1), 2), run=sys.argv[1]
)
"""


def test_a_script_that_was_superseded_says_so_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    code = run_program(tmp_path / "script.py", tmp_path / "log.txt", str(tmp_path / "run"))
    said = (tmp_path / "log.txt").read_text()
    assert code == SUPERSEDED, said
    assert "Traceback" not in said
    # the thread that removes old snapshots may also have met the newer lease, and warned of it
    assert said.count("midstride: another attempt (generation 2)") == 1, said
