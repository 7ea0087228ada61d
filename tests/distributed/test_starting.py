"""Ranks that a Trainer starts by itself: from a script, from within the caller, in a notebook."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.fork_server import outside, run_program, start_program
from support.limit import LIMIT_S

from midstride.engine.processes.lifetime import descendants

MODULE = """
import os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from midstride.engine import Trainer, TrainingModule

class Line(TrainingModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("shown", loss, prog_bar=True)
        return loss

    def test_step(self, batch, batch_idx):
        self.log("samples", float(len(batch[0])), reduce_fx="sum", sync_dist=True)
        self.log("weight", self.layer.weight.sum(), reduce_fx="max", sync_dist=True)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return batch[0][:, 0]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(40.0).view(-1, 4)), 2)

    test_dataloader = predict_dataloader = train_dataloader

"""

CALLS = """
trainer = Trainer(devices=2, max_epochs=1, seed=3, **{options})
module = Line()
before = module.layer.weight.clone()
trainer.fit(module, run=sys.argv[1])
assert trainer.progress.step == 3, trainer.progress
assert not torch.equal(before, module.layer.weight)
assert list(trainer.progress_bar_metrics) == list(trainer.callback_metrics) == ["shown"]
values = trainer.test(module, ckpt_path="last")
assert values["samples"] == 10, values
assert values["weight"] == module.layer.weight.sum().item(), values
"""

AGAIN = """
seen = torch.cat(trainer.predict(module)).tolist()
assert len(seen) == {predictions}, seen
second = Line()
trainer.fit(second)
assert trainer.progress.step == 3, trainer.progress
"""

OUTSIDE = outside()


def run(code: str, folder: Path) -> tuple[int, str]:
    """Run `code` as a script, in a fork; return its exit code, and what it printed."""
    script, log = folder / "script.py", folder / "log.txt"
    script.write_text(code)
    return run_program(script, log, str(folder / "run"), environment=OUTSIDE), log.read_text()


def run_in_notebook(code: str, folder: Path) -> tuple[int, str]:
    """Run `code` as a notebook does: from no file."""
    command = [sys.executable, "-", str(folder / "run")]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, input=code, env=OUTSIDE, timeout=LIMIT_S, **streams)
    return done.returncode, done.stdout


def guarded(code: str) -> str:
    return 'if __name__ == "__main__":\n' + "".join(f"    {line}\n" for line in code.strip().splitlines())


@pytest.mark.parametrize("strategy", ["a script", "ddp_spawn", "a notebook"])
def test_fit_test_predict_and_fit_again(strategy: str, tmp_path: Path) -> None:
    options = {"strategy": strategy} if strategy.startswith("ddp") else {}
    calls = CALLS.format(options=options)
    if strategy != "ddp_spawn":  # what comes back from ranks is as from those of a notebook, which start in no time
        calls += AGAIN.format(predictions=5 if strategy == "a script" else 10)
    start = run_in_notebook if strategy == "a notebook" else run
    code, printed = start(MODULE + guarded(f'{calls}print("did it all")'), tmp_path)
    assert code == 0, printed
    assert printed.count("did it all") == (2 if strategy == "a script" else 1)
    if not options:  # what was chosen by default is announced
        assert "ddp (default: several devices and no strategy given), 2 processes on the CPU" in printed
    assert "batches of 2 make 4 samples a step" in printed


def test_a_fresh_process_that_imports_the_script_is_no_notebook(tmp_path: Path) -> None:
    trainer = 'trainer = Trainer(devices=2, max_epochs=1, strategy="ddp_spawn")\n'
    code, printed = run(MODULE + trainer + guarded('trainer.fit(Line())\nprint("did it all")'), tmp_path)
    assert code == 0, printed
    assert printed.count("did it all") == 1
    assert "notebook" not in printed


#: what is wrong -> the code of a script, and the end of what it prints
REFUSED = {
    "an argument": ("Trainer(max_epochs='x')", "max_epochs: should be a whole number, not 'x'"),
    "a rank": (
        "os.environ.update(RANK='2', WORLD_SIZE='2')\nTrainer()",
        "RANK is 2, and WORLD_SIZE is 2: ranks count from 0",
    ),
    "a strategy": ("Trainer(strategy='dpp')", ""),
    "a call": ("Trainer(max_epochs=1).fit(Line(), resume='x')", "the step of a snapshot, a number, is needed"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_a_script_that_is_refused_ends_with_two(wrong: str, tmp_path: Path) -> None:
    code, said = REFUSED[wrong]
    ended, printed = run(f"import os\n{MODULE}{code}\n", tmp_path)
    assert ended == 2, printed
    assert printed.strip().endswith(said), printed


BROKEN = """
import gc

class Broken(Line):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1:
            raise KeyError("colour")
        return super().training_step(batch, batch_idx)

try:
    Trainer(devices=2, max_epochs=1, strategy="ddp_fork").fit(Broken())
except Exception as error:
    print(type(error).__name__, str(error))
class Collects(Line):
    def setup(self, stage):
        gc.collect()  # what the fit above has left belongs to the process that forks

try:
    Trainer(devices=2, max_epochs=1, strategy="ddp_fork").fit(Collects(), 7)
except Exception as error:
    print(type(error).__name__, str(error))
"""


def test_an_error_of_a_rank_reaches_the_caller_as_itself(tmp_path: Path) -> None:
    code, printed = run(MODULE + BROKEN, tmp_path)
    assert code == 0, printed
    assert "UserCodeError Traceback (most recent call last)" in printed
    assert 'in training_step\n    raise KeyError("colour")' in printed
    assert "raised in Broken.training_step" in printed
    assert "UserError" in printed
    assert "was given a int to train on" in printed


LATER = """
class Later(Line):
    def __init__(self):
        super().__init__()
        self.lazy, self.layer = nn.LazyLinear(1), None
        self.register_buffer("cache", None)

    def setup(self, stage):
        import fractions_of_layers  # in the ranks alone
        self.lazy(torch.ones(1, 4))
        self.layer = self.layer or fractions_of_layers.Half(4, 1)

    def training_step(self, batch, batch_idx):
        self.cache = torch.ones(batch_idx + 1)
        return self.layer(batch[0] + self.lazy(batch[0])).square().mean()

module = Later()
trainer = Trainer(devices=2, max_epochs=1, strategy="ddp_fork")
trainer.fit(module, run=sys.argv[1])
assert len(module.cache) == 3, module.cache
assert module.layer.weight.grad is None
assert trainer.test(module)["weight"] == module.layer.weight.sum().item()
"""


def test_layers_that_hooks_make_in_the_ranks_come_back(tmp_path: Path) -> None:
    (tmp_path / "fractions_of_layers.py").write_text("from torch import nn\n\n\nclass Half(nn.Linear): ...\n")
    code, printed = run(MODULE + LATER, tmp_path)
    assert code == 0, printed


ALONE_BEFORE = """
alone, two = (Trainer(devices=devices, max_epochs=1, seed=3, strategy="ddp_fork") for devices in (1, 2))
for trainer in (alone, two, alone, two):
    trainer.fit(module := Line())
    assert trainer.test(module)["samples"] == 10
"""


ON_A_GPU = """
from midstride.engine import Callback

class Keeps(Callback):
    def __init__(self):
        self.seen = torch.zeros(1)

    def on_fit_start(self, trainer, module):  # in a rank: what it saves from here on says that it was on a GPU
        torch.serialization.register_package(0, lambda storage: "cuda:0", lambda storage, location: None)
        self.seen = torch.ones(1)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]

keeps = Keeps()
Trainer(strategy="ddp_fork", devices=2, max_epochs=1, callbacks=[keeps]).fit(Line())
assert (keeps.seen.item(), keeps.seen.device.type) == (1, "cpu")
"""


def test_what_ranks_have_on_gpus_comes_back_to_the_host(tmp_path: Path) -> None:
    """Where their caller would use a GPU, it could fork no ranks any more."""
    code, log = run(MODULE + ON_A_GPU, tmp_path)
    assert code == 0, log


def test_ranks_are_forked_after_a_fit_in_this_process(tmp_path: Path) -> None:
    code, printed = run(MODULE + ALONE_BEFORE, tmp_path)
    assert code == 0, printed


UNPICKLABLE = """
class Plain:
    pass

if __name__ == "__main__":
    module = Line()
    module.transform = Plain()
    module.transform.fn = lambda x: x
    trainer = Trainer(devices=2, max_epochs=1, strategy="ddp_spawn")
    try:
        trainer.fit(module, {"files": [open(__file__)]})
    except Exception as error:
        print(type(error).__name__, str(error))
    trainer.placement.strategy  # still here
"""


def test_unpicklable_arguments_are_named_before_ranks_start(tmp_path: Path) -> None:
    code, printed = run(MODULE + UNPICKLABLE, tmp_path)
    assert code == 0, printed
    assert "module.transform.fn: " in printed
    assert "data['files'][0]: " in printed
    assert "ddp_fork needs no pickling" in printed


#: torch writes where a tensor was; of a GPU it takes back none on a machine without one, unless it is told otherwise
FROM_A_GPU = """
if __name__ == "__main__":
    torch.serialization.location_tag = lambda storage: "cuda:0"
    Trainer(devices=2, max_epochs=1, strategy="ddp_spawn").fit(Line())
"""


def test_ranks_take_tensors_of_a_gpu_on_the_host(tmp_path: Path) -> None:
    code, printed = run(MODULE + FROM_A_GPU, tmp_path)
    assert code == 0, printed


@pytest.mark.parametrize("options", [{}, {"strategy": "ddp_fork"}], ids=["script", "fork"])
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_no_rank_outlives_its_caller(ending: signal.Signals, options: dict[str, Any], tmp_path: Path) -> None:
    """Law 6; asked nicely, the ranks take a snapshot first."""
    code = """
import pathlib
def tell(self, *_):
    if self.trainer.global_step == 1:
        pathlib.Path(sys.argv[1]).with_name(f"trains-{os.getpid()}").touch()
Line.on_train_batch_end = tell
Trainer(devices=2, max_epochs=10**5, snapshots={"every_steps": 10**6}, **OPTIONS).fit(Line(), run=sys.argv[1])
"""
    code = code.replace("OPTIONS", str(options))
    script = tmp_path / "script.py"
    script.write_text(MODULE + guarded(code))
    log = tmp_path / "log.txt"
    log.touch()
    caller = start_program(script, log, str(tmp_path / "run"), environment=OUTSIDE)
    try:
        deadline = time.monotonic() + LIMIT_S
        while len(list(tmp_path.glob("trains-*"))) < 2:  # before that there is nothing to take a snapshot of
            assert caller.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        ranks = descendants(caller.pid)
        assert ranks
        caller.send_signal(ending)
        ended = caller.wait(LIMIT_S)
        while [rank for rank in ranks if Path(f"/proc/{rank}").exists()]:
            assert time.monotonic() < deadline + 30, "ranks live on"
            time.sleep(0.05)
    finally:
        caller.kill()
        caller.wait()
    snapshots = list((tmp_path / "run" / "snapshots").glob("*/manifest.json"))
    assert bool(snapshots) == (ending == signal.SIGTERM), log.read_text()
    assert ended == (75 if ending == signal.SIGTERM else -9), log.read_text()
    assert "Traceback" not in log.read_text()
    assert log.read_text().count("midstride: asked to stop, after step") == len(snapshots)


EARLY = """
import signal, time

class Early(Line):
    def setup(self, stage):
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(600)

Trainer(devices=2, max_epochs=1, strategy="ddp_fork").fit(Early(), run=sys.argv[1])
"""


def test_a_stop_before_ranks_listen_reaches_the_caller(tmp_path: Path) -> None:
    code, printed = run(MODULE + EARLY, tmp_path)
    assert code == 75, printed
    assert "midstride: asked to stop while ranks were starting or ending; the same command" in printed
