"""The engine's command line: its exit codes, and errors in one block."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import run

from midstride.engine.cli.app import main

MODEL = """
import os
import signal
import sys
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
from midstride.engine import DataModule, TrainingModule

class Net(TrainingModule):
    def __init__(self, fail_at: int = -1) -> None:
        super().__init__()
        self.fail_at = fail_at
        self.layer = torch.nn.Linear(2, 1)
        self.words = {f"word {number}" for number in range(16)}
    def training_step(self, batch, batch_idx):
        if self.global_step == self.fail_at:
            raise KeyError("a mistake in the user's code")
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

class Data(DataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(32.0).view(16, 2)), batch_size=4)

class Large(Data):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(12, 2)), batch_size=100_000)

class OfSet(Data):
    def names(self):
        return {f"word {number}" for number in range(16)}
    def train_dataloader(self):
        order = [float(name.split()[1]) for name in self.names()]
        return DataLoader(TensorDataset(torch.tensor(order).view(16, 1).repeat(1, 2)), batch_size=4)

class OfFiles(OfSet):
    def names(self):
        folder = Path(__file__).with_name("words")
        folder.mkdir(exist_ok=True)
        for name in super().names():
            (folder / name).touch()
        return [path.name for path in folder.iterdir()]

calls = []

class Remembers(Net):
    def training_step(self, batch, batch_idx):
        calls.append(batch_idx)
        return super().training_step(batch, batch_idx) * len(calls)

class Silent(Net):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)

class Picky(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) if batch_idx else None

class Stepless(Net):
    training_step = TrainingModule.training_step

class Bare(Net):
    configure_optimizers = TrainingModule.configure_optimizers

class Quits(Net):
    def training_step(self, batch, batch_idx):
        sys.exit(3)

class Crashes(Net):
    def training_step(self, batch, batch_idx):
        os.kill(os.getpid(), signal.SIGSEGV)

class Scored(Net):
    def training_step(self, batch, batch_idx):
        self.log("train/accuracy", 0.5)
        return super().training_step(batch, batch_idx)

class Elsewhere(Data):
    def setup(self, stage):
        open("data/train.csv")

class Judged(Net):
    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.layer(batch[0]).mean())
    def test_step(self, batch, batch_idx):
        self.log("test/score", self.layer(batch[0]).mean())

class Days(Data):
    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.val_dataloader = self.test_dataloader = self.train_dataloader
    def prepare_data(self):
        Path(self.folder, "images").read_text()
"""

pytestmark = pytest.mark.usefixtures("forked_worlds")

JOB = """
name: tiny
module: cli_model:Net
data: cli_model:Data
trainer: {max_epochs: 2}
snapshots: {every_steps: 2}
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    (tmp_path / "cli_model.py").write_text(MODEL)
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return str(path)


def test_faults_end_with_2_in_one_block(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fit", job, "--run", "a", "--set", "trainer.seed=3", "--set", "world.processes=2") == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        f"2 faults in {job}:",
        "  world: strategy single has one process, not 2; for more choose ddp",
        "  trainer.seed: has its place at the top of the job: seed",
    ]


def test_tasks_of_srun_do_not_start_a_world_each(job: str, tmp_path: Path) -> None:
    tasks = []
    for task in range(2):
        step = {"SLURM_JOB_ID": "41", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(task)}
        command = [sys.executable, "-m", "midstride.engine", "fit", job, "--run", "a"]
        tasks.append(subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **step}, stderr=subprocess.PIPE))
    for task in tasks:
        said = task.communicate()[1].decode()
        assert task.returncode == 2
        assert "srun starts this command 2 times, and each would start ranks of its own. Start it once" in said
    assert not (tmp_path / "runs").exists()


def test_check_tells_every_fault_at_once(job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs").write_text("a file where the store should be")
    assert run("check", job, "--set", "module_args.hiden=3", "--set", "data=cli_model:Date") == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"3 faults in {job}:")
    for part in ("module_args.hiden: cli_model:Net takes no 'hiden'", "did you mean 'Data'?", "cannot be written"):
        assert part in shown


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("module_args.fail_at=0", 'KeyError: "a mistake in the user\'s code"'),
        ("monitor={metric: loss}", "monitor: loss is not logged; logged: "),
        ("module=cli_model:Data", "module: cli_model:Data is not a TrainingModule"),
        ("module=cli_model:Stepless", "\n  Stepless has no training_step: write one that returns the loss\n"),
        ("module=cli_model:Bare", "\n  Bare has no configure_optimizers: write one that returns an optimizer\n"),
        ("module=cli_model:Quits", "sys.exit(3)\n"),
        ("data=cli_model:Elsewhere", "this path is relative to the current folder, /"),
    ],
)
def test_check_tries_a_step_and_says_no_more_than_is_wrong(
    job: str, capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    assert run("check", job, "--set", override) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"1 fault in {job}:")
    assert said in shown
    assert "samples a step" not in shown


def test_check_tries_lanes_and_says_how_many_processes_will_do(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", job, "--set", "world={strategy: ddp, lanes: 8, processes: 4}") == 0
    said = f"{job} is in order\n8 lanes: 1, 2, 4 or 8 processes end with the same bits\n"
    assert capsys.readouterr().out.startswith(said)  # a warning may follow, of a machine with fewer cores


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("world={strategy: ddp, processes: 64}", "world.processes: 64 processes share the "),
        (
            "monitor={metric: train/accuracy}",
            "monitor.mode: the smallest train/accuracy counts as the best; set mode: max",
        ),
        ("data=cli_model:Large", "a batch of 100,000 is more than the 12 samples of an epoch"),
    ],
)
def test_check_warns_of_what_is_hardly_meant(
    job: str, capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    assert run("check", job, "--set", "module=cli_model:Scored", "--set", override) == 0
    assert said in capsys.readouterr().out


def test_check_shows_quoted_numbers(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", job, "--set", "module_args.fail_at='0'") == 0
    assert run("check", job, "--set", "module=cli_model:Stepless", "--set", "data_args.size='1e-3'") == 2
    assert "data_args.size: '1e-3' is text: leave the quotes out if a number is meant" in capsys.readouterr().err


def test_a_crash_of_check_names_the_line(job: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "midstride.engine", "check", job, "--set", "module=cli_model:Crashes"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert "cli_model.py" in done.stderr
    assert " in training_step" in done.stderr


def test_check_says_what_a_scheduler_would_be_asked(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    world = "{strategy: ddp, lanes: 2, nodes: '1:2', on: slurm, on_args: {partition: gpu}}"
    assert run("check", job, "--set", f"world={world}") == 0
    shown = capsys.readouterr().out
    assert "1 node (1 rank) will do\n2 nodes (2 ranks) will do\n" in shown
    assert "it would request machines with: sbatch --parsable --nodes=1 --array=0-1" in shown
    assert "--partition=gpu --wrap='exec srun" in shown


def test_check_resumes_a_few_steps_where_it_is_asked_to(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", job, "--resume") == 0
    assert capsys.readouterr().out == f"{job} is in order, and resumes exactly\n"
    assert run("check", job, "--resume", "--set", "module=cli_model:Remembers") == 2
    told = capsys.readouterr().err
    assert "resumed after step 1 (at a step), the run ends differently" in told
    assert "global cli_model.calls" in told


@pytest.mark.parametrize("data", ["OfSet", "OfFiles"])
def test_check_resumes_in_an_interpreter_of_other_orders(
    job: str, capsys: pytest.CaptureFixture[str], data: str
) -> None:
    assert run("check", job, "--resume", "--set", f"data=cli_model:{data}") == 2
    told = capsys.readouterr().err
    assert "resumed in a new interpreter" in told
    assert "other samples at the same indices than when the run began" in told
    assert "the order of a set or of os.listdir" in told


def test_check_names_a_step_that_never_returns_a_loss(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", job, "--set", "module=cli_model:Silent") == 2
    assert "Silent.training_step returned no loss for any of the 4 batches" in capsys.readouterr().err
    assert run("check", job, "--set", "module=cli_model:Picky") == 0


def test_check_tries_a_night(job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "2026-03-01").mkdir()
    (tmp_path / "2026-03-01" / "images").write_text("there")
    choices = ["module=cli_model:Judged", "data=cli_model:Days", "data_args.folder=./{date}"]
    night = ["check", job, *(word for choice in choices for word in ("--set", choice)), "--date"]
    assert run(*night, "2026-03-02") == 2
    shown = capsys.readouterr().err
    assert "monitor: is missing; name the value by which" in shown
    assert f"No such file or directory: '{tmp_path}/2026-03-02/images'" in shown
    assert run(*night, "2026-03-01", "--set", "monitor={metric: val/loss}") == 2
    said = "nightly.metric: the test logs no test/loss; it logs test/score"
    assert capsys.readouterr().err.splitlines() == [f"1 fault in {job}:", f"  {said}"]
    assert run(*night, "2026-03-01", "--set", "monitor={metric: val/loss}", "--set", "nightly.metric=test/score") == 0
    assert capsys.readouterr().out.startswith(f"{job} is in order as the night of 2026-03-01\n")


def test_a_job_that_needs_a_date_is_no_run_of_its_own(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fit", job, "--run", "a", "--set", "data_args.folder=./{date}") == 2
    assert "data_args.folder: {date} is the date of a night: train it by midstride nightly" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fitt"], 'Unknown command "fitt". Did you mean "fit"?'),
        (["fit", "a", "b", "--run", "x"], "unexpected argument: 'b'"),
        (["fit", "a", "--run", "x", "--set", "seed", "3"], "'3'; write --set KEY=VALUE, without spaces"),
        (["fit", "a"], "--run is missing: "),
        (["fit", "--run", "x"], "JOB is missing: "),
        (["fit", "a", "--run"], "--run requires an argument"),
    ],
)
def test_a_mistyped_command_says_where_to_read_on(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert run(*arguments) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert "--help lists what can be given" in shown


@pytest.mark.parametrize(("is_read", "ends_with"), [(False, SystemExit), (True, BrokenPipeError)])
def test_a_reader_that_goes_ends_a_command_without_a_traceback(
    is_read: bool, ends_with: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(*_: object, **__: object) -> None:
        raise BrokenPipeError

    reading, writing = os.pipe()
    with os.fdopen(reading) as reader, os.fdopen(writing, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        if not is_read:
            reader.close()
        with pytest.raises(ends_with) as ended:
            main(command, arguments=())
        assert getattr(ended.value, "code", 1) == 1


def test_an_error_of_the_user_shows_their_traceback_first(job: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("fit", job, "--run", "a", "--set", "module_args.fail_at=3") == 2
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert "cli_model.py" in lines[1]
    assert 'KeyError: "a mistake in the user\'s code"' in lines


def test_a_run_from_fit_to_prune(job: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    environment = dict(os.environ)
    assert run("fit", job, "--run", "a") == 0
    assert "tiny a: done" in capfd.readouterr().out
    assert run("fit", job, "--run", "a") == 0
    capfd.readouterr()
    store = str(tmp_path / "runs")
    assert run("snapshots", "verify", store) == 0
    shown = capfd.readouterr().out
    names = re.findall(r"\d{12}\S*-g\d{6}", shown)
    assert names
    assert shown.count("verified") == len(names)
    damaged = next((tmp_path / "runs" / "a" / "snapshots" / names[0]).glob("*.safetensors"))
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    assert run("snapshots", "verify", f"{store}/a") == 1
    assert "damaged" in capfd.readouterr().out
    assert run("snapshots", "prune", f"{store}/a", "--keep", "1") == 0
    capfd.readouterr()
    assert run("snapshots", "list", f"{store}/a") == 0
    assert re.findall(r"\d{12}\S*-g\d{6}", capfd.readouterr().out) == names[-1:]
    assert dict(os.environ) == environment


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("snapshots", "list", "."), "is not a run and contains none"),
        (("snapshots", "prune", ".", "--keep", "0"), "at least 1 is needed, not 0"),
    ],
)
def test_wrong_places(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err
