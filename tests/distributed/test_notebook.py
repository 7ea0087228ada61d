"""A real Jupyter kernel: fits in its cells; their ranks killed, the kernel too, cells interrupted, and code edited."""

import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from jupyter_core.utils import run_sync
from laws.lives import assert_runs_alike
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError
from nbformat.v4 import new_code_cell, new_notebook
from support.fork_server import outside, run_program
from support.leaks import LASTING_PROCESSES
from support.limit import LIMIT_S

#: what is run starts without the place of a world, and without what tells ipykernel to leave the streams alone
OUTSIDE = {name: value for name, value in outside().items() if name != "PYTEST_CURRENT_TEST"}

CLASSES = """
import os, signal, time
from pathlib import Path
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from midstride.engine import Trainer, TrainingModule

KERNEL = os.getpid()

class Numbers(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.tensor([index / 48, 1.0, index % 5, index % 7]), index % 2

class Note:
    def __init__(self, step):
        self.step = step

class Net(TrainingModule):
    def __init__(self):
        super().__init__()
        self.layer, self.notes = torch.nn.Linear(4, 2), []

    def training_step(self, batch, batch_idx):
        step, mark = self.trainer.global_step, Path(self.trainer.run_url, "struck")
        if step == 9 and self.global_rank == self.trainer.world_size - 1 and not mark.exists():
            mark.touch()
            while not [*mark.parent.glob("snapshots/000000000008-*/manifest.json")]:  # it is written behind training
                time.sleep(0.01)
            BEFALLS
        self.notes.append(Note(step))  # an object of a class of this cell, made in training
        x, y = batch
        loss = F.cross_entropy(self.layer(F.dropout(x, 0.2)), y) * FACTOR
        self.log("loss", loss)
        self.log("noted", float(sum(note.step for note in self.notes)))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
"""

FIT = """
trainer = Trainer(max_epochs=3, seed=5, snapshots={"every_steps": 4}, **OPTIONS)
net, numbers = Net(), DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=WORKERS)
trainer.fit(net, numbers, run=RUN)
print("ends as", {name: value.tolist() for name, value in net.state_dict().items()})
"""

#: by name: the arguments of a Trainer, the workers of its data, and what a script says for ranks of its own
STARTED: dict[str, tuple[dict[str, object], int, dict[str, object]]] = {
    "one process": ({}, 1, {}),
    "ddp_notebook, 1": ({"strategy": "ddp_notebook", "devices": 1}, 0, {"strategy": "ddp_fork", "devices": 1}),
    "ddp_notebook, 2": ({"devices": 2}, 0, {"strategy": "ddp_fork", "devices": 2}),
}


def classes(befalls: str = "pass", factor: float = 1.0) -> str:
    """Return the cell of the classes: what befalls the last rank once, in mid-epoch, and how large a loss is."""
    return CLASSES.replace("BEFALLS", befalls).replace("FACTOR", str(factor))


def fit(started: str, run: Path, *, in_script: bool = False) -> str:
    """Return the cell that trains, or its counterpart in a script."""
    options, workers, scripted = STARTED[started]
    named = {"OPTIONS": scripted if in_script else options, "WORKERS": workers, "RUN": str(run)}
    cell = FIT
    for name, value in named.items():
        cell = cell.replace(name, repr(value))
    return cell


class Kernel:
    """A Jupyter kernel, and the notebook of its cells. Nothing is written but to `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._client = NotebookClient(new_notebook(), timeout=LIMIT_S, allow_errors=True, startup_timeout=LIMIT_S)
        manager = self._client.create_kernel_manager()
        manager.transport, manager.ip = "ipc", str(folder / "k")  # nothing listens where others can reach it

    @contextmanager
    def running(self) -> Iterator["Kernel"]:
        with self._client.setup_kernel(env={**OUTSIDE, "IPYTHONDIR": str(self._folder)}):
            self._note_process()
            yield self

    def run(self, code: str) -> str:
        """Run a cell; return what stands below it, an error's last line included."""
        cell = new_code_cell(code)
        self._client.nb.cells.append(cell)
        self._client.execute_cell(cell, len(self._client.nb.cells) - 1)
        return "".join(
            f"{output.ename}: {output.evalue}\n" if output.output_type == "error" else output.text
            for output in cell.outputs
        )

    def start_again(self) -> None:
        """Start a new kernel in the place of one that was killed."""
        run_sync(self._client.km.restart_kernel)(now=True)
        run_sync(self._client.kc.wait_for_ready)(timeout=LIMIT_S)
        self._note_process()

    def _note_process(self) -> None:
        LASTING_PROCESSES.add(self._client.km.provisioner.process.pid)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with Kernel(tmp_path_factory.mktemp("kernel")).running() as kernel:
        yield kernel


Scripted = Callable[..., tuple[Path, str]]


@pytest.fixture(scope="module")
def in_script(tmp_path_factory: pytest.TempPathFactory) -> Scripted:
    """Return a function that trains in processes of one script each; it gives the run, and what the last printed."""

    @cache
    def train(started: str, *lives: str) -> tuple[Path, str]:
        run = tmp_path_factory.mktemp("scripted") / "run"
        run.mkdir()
        for number, life in enumerate(lives):
            script, log = run.parent / f"life{number}.py", run.parent / f"life{number}.txt"
            body = textwrap.indent(fit(started, run, in_script=True), "    ")
            script.write_text(f'{life}\nif __name__ == "__main__":\n{body}')
            code = run_program(script, log, environment=OUTSIDE)
            assert (code == 0) == (number == len(lives) - 1), log.read_text()
        return run, log.read_text()

    return train


@pytest.mark.parametrize("started", STARTED)
def test_a_cell_trains_as_a_script_does(started: str, kernel: Kernel, in_script: Scripted, tmp_path: Path) -> None:
    expected, printed = in_script(started, classes())
    kernel.run(classes())
    said = kernel.run(fit(started, tmp_path / "run"))
    assert ends(said) == ends(printed), said
    assert_runs_alike(str(tmp_path / "run"), str(expected), ["last"])


#: by name: how it is started; what befalls it, and what the cell says then; the cells that are run after that. Jupyter
#: sends an interrupt to the group of the kernel, which is also that of its ranks: a snapshot is taken where they stand.
INTERRUPTED = (
    """os.killpg(os.getpgid(0), signal.SIGINT)
            while not self.trainer.requests.stop_requested:
                time.sleep(0.01)""",
    "StopRequested: asked to stop, after step 1",
)
KILLED = ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 ended without a word: it was killed")
CRASHED = (
    '__import__("ctypes").string_at(0)',
    "rank 1 crashed in native code, a segmentation fault (SIGSEGV), called by training_step",
)
BROKEN = ('raise ValueError("a bug")', "ValueError: a bug\nraised in Net.training_step")
RESUMED = {
    "one process, interrupted": ("one process", *INTERRUPTED, []),
    "two, interrupted, the class again": ("ddp_notebook, 2", *INTERRUPTED, [classes()]),
    "a rank killed": ("ddp_notebook, 2", *KILLED, []),
    "a rank crashed": ("ddp_notebook, 2", *CRASHED, []),
    "one process, a class edited": ("one process", *BROKEN, [classes(factor=2.0)]),
    "two, a class edited": ("ddp_notebook, 2", *BROKEN, [classes(factor=2.0)]),
}


@pytest.mark.parametrize("name", RESUMED)
def test_the_next_cell_resumes(name: str, kernel: Kernel, in_script: Scripted, tmp_path: Path) -> None:
    started, befalls, said, between = RESUMED[name]
    lives = [classes(befalls), *between] if befalls == BROKEN[0] else [classes()]
    expected, printed = in_script(started, *lives)
    kernel.run(classes(befalls))
    cell = fit(started, tmp_path / "run")
    assert said in (first := kernel.run(cell)), first
    for code in between:
        kernel.run(code)
    second = kernel.run(cell)
    step = "1." if befalls == INTERRUPTED[0] else "08"
    assert re.search(rf"generation 2 resumes from snapshot 0000000000{step}-g000001, step ", second), second
    assert ends(second) == ends(printed), second
    assert_runs_alike(str(tmp_path / "run"), str(expected), ["last"])


def test_a_new_kernel_resumes(kernel: Kernel, in_script: Scripted, tmp_path: Path) -> None:
    started = "ddp_notebook, 2"
    expected, printed = in_script(started, classes())
    kernel.run(classes("os.kill(KERNEL, signal.SIGKILL); signal.pause()"))
    with pytest.raises(DeadKernelError):
        kernel.run(fit(started, tmp_path / "run"))
    kernel.start_again()
    kernel.run(classes())
    said = kernel.run(fit(started, tmp_path / "run"))
    assert "generation 2 resumes from snapshot 000000000008-g000001, step 8" in said
    assert ends(said) == ends(printed), said
    assert_runs_alike(str(tmp_path / "run"), str(expected), ["last"])


def ends(printed: str) -> str:
    """Return the line that tells the weights."""
    return next((line for line in printed.splitlines() if line.startswith("ends as")), "")
