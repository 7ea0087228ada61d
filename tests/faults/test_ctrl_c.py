"""Ctrl-C in a script: the first press takes a snapshot and ends the script, the second one ends it at once."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.fork_server import run_program

from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.storage.store import Store

SCRIPT = """
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader
from midstride.engine import Trainer, TrainingModule

run, presses, options = sys.argv[1] or None, int(sys.argv[2]), eval(sys.argv[3])

class Net(TrainingModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        if self.global_step == 2 and self.trainer.world.is_first:
            for _ in range(presses):  # it reaches all processes of a terminal
                os.killpg(0, signal.SIGINT)
                time.sleep(0.2)  # two signals that wait count as one
            while run and not self.trainer.requests.stop_requested:
                time.sleep(0.01)
            if presses == 2:
                time.sleep(600)
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal
    trainer = Trainer(max_epochs=400, snapshots={"every_steps": 10_000}, **options)
    trainer.fit(Net(), DataLoader(torch.ones(8, 1), 2, num_workers=1), run=run)
"""

ONE: dict[str, Any] = {}
DDP, SPAWNED, FORKED = ({"strategy": name, "devices": 2} for name in ("ddp", "ddp_spawn", "ddp_fork"))

#: arguments of the Trainer, whether there is a run, presses; the code, and a line of its own
PRESSED = {
    "one process": (ONE, True, 1, 75, "asked to stop, after step "),
    "one process, twice": (ONE, True, 2, 130, "midstride: interrupted"),
    "one process, no run": (ONE, False, 1, 130, "midstride: interrupted"),
    "ddp": (DDP, True, 1, 75, "asked to stop, after step "),
    "ddp_fork": (FORKED, True, 1, 75, "asked to stop, after step "),
    "ddp_fork, twice": (FORKED, True, 2, 130, "midstride: interrupted"),
    "ddp_spawn": (SPAWNED, True, 1, 75, "asked to stop, after step "),
}


@pytest.mark.parametrize("name", PRESSED)
def test_ctrl_c_takes_a_snapshot_and_ends_a_script(name: str, tmp_path: Path) -> None:
    options, has_run, presses, code, line = PRESSED[name]
    script, log, run = tmp_path / "script.py", tmp_path / "log.txt", tmp_path / "run"
    script.write_text(SCRIPT)
    environment = {key: value for key, value in os.environ.items() if not key.endswith(("RANK", "WORLD_SIZE"))}
    arguments = [str(run) if has_run else "", str(presses), repr(options)]
    assert run_program(script, log, *arguments, environment=environment) == code, log.read_text()
    said = log.read_text()
    assert "Traceback" not in said
    assert said.count(line) == 1, said
    assert said.count("Ctrl-C: stopping after a snapshot") == int(has_run), said
    steps = [one.position.step for one in SnapshotCatalog(Store.open(run)).snapshots()] if run.exists() else []
    assert (max(steps, default=0) > 2) == (code == 75), "a snapshot where training stood"


LOOP = """
import signal, sys
import torch
from torch.utils.data import DataLoader
from midstride.engine import Loop

signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal
loop = Loop(sys.argv[1], snapshots={"every_steps": 10_000})
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loop.keep(model=model, optimizer=optimizer)
for step, x in enumerate(loop.steps(loop.loader(DataLoader(torch.ones(8, 1), 2)), 400)):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 2:
        for _ in range(int(sys.argv[3])):
            signal.raise_signal(int(sys.argv[2]))  # this thread has it before the next line
"""


@pytest.mark.parametrize(
    ("number", "times", "code", "line", "steps"),
    [
        (signal.SIGTERM, 1, 75, "asked to stop, after step 3", [3]),
        (signal.SIGINT, 1, 75, "asked to stop, after step 3", [3]),
        (signal.SIGINT, 2, 130, "midstride: interrupted", []),
    ],
)
def test_a_loop_stops_after_a_snapshot(
    number: signal.Signals, times: int, code: int, line: str, steps: list[int], tmp_path: Path
) -> None:
    script, log, run = tmp_path / "script.py", tmp_path / "log.txt", tmp_path / "run"
    script.write_text(LOOP)
    environment = {key: value for key, value in os.environ.items() if not key.endswith(("RANK", "WORLD_SIZE"))}
    arguments = [str(run), str(int(number)), str(times)]
    assert run_program(script, log, *arguments, environment=environment) == code, log.read_text()
    said = log.read_text()
    assert said.count(line) == 1, said
    assert "Traceback" not in said
    assert [one.position.step for one in SnapshotCatalog(Store.open(run)).snapshots()] == steps
