"""Ctrl-C in a script: the first press takes a snapshot and ends the script, the second one ends it at once."""

import ast
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.fork_server import outside, run_program

from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.storage.store import Store

SCRIPT = """
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader
from midstride.engine import Trainer, TrainingModule

run, presses, options, log = sys.argv[1] or None, int(sys.argv[2]), eval(sys.argv[3]), sys.argv[4]

class Net(TrainingModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        if self.global_step == 2 and self.trainer.world.is_first:
            for press in range(presses):  # it reaches all processes of a terminal
                os.killpg(0, signal.SIGINT)
                while not press and presses == 2 and "Ctrl-C: stopping" not in open(log).read():
                    time.sleep(0.01)  # two signals that wait count as one
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
    arguments = [str(run) if has_run else "", str(presses), repr(options), str(log)]
    assert run_program(script, log, *arguments, environment=outside()) == code, log.read_text()
    said = log.read_text()
    assert "Traceback" not in said
    assert said.count(line) == 1, said
    assert said.count('this fit saves nothing: fit(..., run="runs/first") saves it') == int(not has_run), said
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
    arguments = [str(run), str(int(number)), str(times)]
    assert run_program(script, log, *arguments, environment=outside()) == code, log.read_text()
    said = log.read_text()
    assert said.count(line) == 1, said
    assert "Traceback" not in said
    assert [one.position.step for one in SnapshotCatalog(Store.open(run)).snapshots()] == steps


ANYWHERE = """
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader
from midstride.engine import Trainer, TrainingModule

run, at, mark, options = sys.argv[1], sys.argv[2], sys.argv[3], eval(sys.argv[4])

class Net(TrainingModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def press(self, where):
        if where != at or self.trainer.world.rank or os.path.exists(mark):
            return
        open(mark, "w").close()
        os.killpg(0, signal.SIGINT)
        while where == "setup" or not self.trainer.requests.stop_requested:
            time.sleep(0.01)

    def setup(self, stage):
        self.press("setup")

    def training_step(self, batch, batch_idx):
        return (self.layer(batch) + torch.rand(1)).square().mean()

    def validation_step(self, batch, batch_idx):
        if self.global_step > 2:
            self.press("validation")
        self.log("val/loss", self.layer(batch).square().mean())

    def test_step(self, batch, batch_idx):
        self.press("test")

    def on_save_checkpoint(self, checkpoint):
        if self.global_step > 2:
            self.press("saving")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal
    trainer = Trainer(max_epochs=3, seed=1, snapshots={"every_steps": 3}, **options)
    data, module = DataLoader(torch.ones(8, 1), 2), Net()
    trainer.fit(module, DataLoader(torch.arange(8.0).view(8, 1), 2, shuffle=True), data, run=run)
    trainer.test(module, data)
    print("weights", [one.tolist() for one in module.parameters()])
"""

STARTING = "asked to stop while ranks were starting or ending"
#: arguments of the Trainer, where Ctrl-C comes; the code, and the last line
PHASES = {
    "while it is set up": (ONE, "setup", 130, "midstride: interrupted"),
    "while ranks are set up": (FORKED, "setup", 75, f"midstride: {STARTING}"),
    "in a validation": (ONE, "validation", 75, "midstride: asked to stop, after step 4;"),
    "in a validation of ranks": (FORKED, "validation", 75, "midstride: asked to stop, after step "),  # they agree
    "while a snapshot is taken": (ONE, "saving", 75, "midstride: asked to stop, after step 3;"),
    "in a test": (ONE, "test", 130, "midstride: interrupted"),
}


def run_anywhere(folder: Path, run: str, at: str, options: dict[str, Any]) -> tuple[int, list[str]]:
    """Run the script above, which is interrupted `at` a place unless that has been; return its code and lines."""
    script, log = folder / "script.py", folder / f"{run}.txt"
    script.write_text(ANYWHERE)
    log.unlink(missing_ok=True)
    arguments = [str(folder / run), at, str(folder / "mark"), repr(options)]
    return run_program(script, log, *arguments, environment=outside()), log.read_text().splitlines()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return a function that gives the last line of an undisturbed script, by the options of its Trainer."""

    @cache
    def last_line(options: str) -> str:
        code, said = run_anywhere(tmp_path_factory.mktemp("calm"), "run", "nowhere", ast.literal_eval(options))
        assert code == 0, said
        assert said[-1].startswith("weights ")
        return said[-1]

    return last_line


@pytest.mark.parametrize("name", PHASES)
def test_ctrl_c_anywhere_ends_with_one_line_and_loses_nothing(
    name: str, calm: Callable[[str], str], tmp_path: Path
) -> None:
    options, at, code, line = PHASES[name]
    ended, said = run_anywhere(tmp_path, "run", at, options)
    assert ended == code, said
    assert (tmp_path / "mark").exists()
    assert said[-1].startswith(line), said
    assert not [words for words in said if "Traceback" in words]
    after, resumed = run_anywhere(tmp_path, "run", at, options)
    assert after == 0, resumed
    assert resumed[-1] == calm(repr(options))
