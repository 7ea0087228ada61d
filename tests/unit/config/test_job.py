"""Jobs: read as people mean them, refused with every fault at once."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from midstride.engine.config.job import TrainingJob
from midstride.engine.config.strategies import STRATEGIES
from midstride.engine.config.yaml_file import parse_yaml
from midstride.engine.errors import JobError

JOB = """
name: digits
module: model:Classifier
data: model:Digits
world: {strategy: ddp, processes: 2, nodes: 1}
trainer: {max_epochs: 5, precision: 32}
snapshots: {url: runs, every_steps: 20}
"""


def write(folder: Path, text: str = JOB) -> Path:
    path = folder / "job.yaml"
    path.write_text(text)
    return path


def faults(folder: Path, text: str = JOB, *overrides: str) -> list[str]:
    with pytest.raises(JobError) as caught:
        TrainingJob.load(write(folder, text), overrides)
    head, *lines = str(caught.value).splitlines()
    count = "1 fault" if len(lines) == 1 else f"{len(lines)} faults"
    assert head == f"{count} in {folder / 'job.yaml'}:"
    return [line.strip() for line in lines]


def test_numbers_where_text_is_meant_are_taken(tmp_path: Path) -> None:
    job = TrainingJob.load(write(tmp_path))
    assert (job.trainer.precision, job.world.nodes, job.world.launched_by) == ("32", "1", "torchrun")


def test_paths_are_absolute_against_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    callbacks = "callbacks: [{path: model:Mine, args: {file: ./a.csv}}, {path: model:Mine}]\n"
    write(folder, JOB + "data_args: {folder: ./data, name: data, parts: [../a]}\n" + callbacks)
    monkeypatch.chdir(tmp_path)
    job = TrainingJob.load("jobs/job.yaml")
    assert job.folder == str(folder)
    assert job.run_url("night-1") == f"{folder}/runs/night-1"
    assert job.data_args == {"folder": f"{folder}/data", "name": "data", "parts": [str(tmp_path / "a")]}
    assert [callback.args for callback in job.callbacks] == [{"file": f"{folder}/a.csv"}, {}]


def test_loggers_are_written_short(tmp_path: Path) -> None:
    text = JOB + "loggers: [tensorboard, {mlflow: {experiment: a}}, {wandb: }, {path: m:Mine, args: {to: ./b}}]\n"
    job = TrainingJob.load(write(tmp_path, text))
    assert [(logger.path, logger.args) for logger in job.loggers] == [
        ("tensorboard", {}),
        ("mlflow", {"experiment": "a"}),
        ("wandb", {}),
        ("m:Mine", {"to": f"{tmp_path}/b"}),
    ]
    assert TrainingJob.model_validate(job.model_dump(mode="json")) == job


def test_loggers_need_snapshots(tmp_path: Path) -> None:
    text = JOB + "loggers: [tensorboard]\n"
    assert faults(tmp_path, text, "snapshots=null") == [
        "loggers receive rows when snapshots are committed, but snapshots is null: set it, or leave loggers out"
    ]


def test_lightnings_old_name_of_an_option_is_taken(tmp_path: Path) -> None:
    job = TrainingJob.load(write(tmp_path), ["trainer.replace_sampler_ddp=false"])
    assert job.trainer.use_distributed_sampler is False


def test_minus_one_step_is_no_limit_as_in_lightning(tmp_path: Path) -> None:
    assert TrainingJob.load(write(tmp_path), ["trainer.max_steps=-1"]).trainer.max_steps is None
    assert faults(tmp_path, JOB, "trainer.max_steps=-1", "trainer.max_epochs=null") == [
        "trainer: set max_epochs, max_steps or max_time: the training would never end"
    ]


@pytest.mark.parametrize("unit", ["epochs", "steps"])
def test_a_training_that_ends_before_its_least_is_refused(unit: str, tmp_path: Path) -> None:
    assert faults(tmp_path, JOB, f"trainer.min_{unit}=3", f"trainer.max_{unit}=2") == [
        f"trainer: min_{unit} is 3, and max_{unit} 2: the training ends before that. Raise max_{unit}"
    ]


def test_a_job_from_before_says_retries(tmp_path: Path) -> None:
    job = TrainingJob.load(write(tmp_path), ["retries=5"])
    assert job.retries_without_progress == 5
    assert "retries" not in job.model_dump()
    assert faults(tmp_path, JOB, "retries=5", "retries_without_progress=5") == [
        "retries: is the old name of retries_without_progress, which is given too: leave it out"
    ]


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b"])
def test_a_run_name_is_a_folder_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(JobError, match="letters, digits"):
        TrainingJob.load(write(tmp_path)).run_url(name)


def test_choices_set_from_outside(tmp_path: Path) -> None:
    job = TrainingJob.load(write(tmp_path), ["trainer.max_epochs=2", "module_args.lr=1e-3", "monitor.metric=val/a=b"])
    assert (job.trainer.max_epochs, job.module_args, job.monitor and job.monitor.metric) == (2, {"lr": 1e-3}, "val/a=b")


def test_overrides_add_to_the_accepted_changes_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, JOB + "accept_change: [seed]\n")
    assert TrainingJob.load(path, accepted=["data_args"]).accept_change == ("seed", "data_args")
    assert TrainingJob.load(path, ["accept_change=[module]"], ["data"]).accept_change == ("module", "data")
    assert TrainingJob.load(write(tmp_path), accepted=["data"]).accept_change == ("data",)
    with pytest.raises(JobError, match="accept_change: should be a list, not 'seed'"):
        TrainingJob.load(path, ["accept_change=seed"], ["data"])


def test_every_fault_is_told_at_once(tmp_path: Path) -> None:
    text = JOB.replace("processes: 2", "processes: 0").replace("ddp", "dpd").replace("max_epochs: 5", "max_epochs: x")
    known = sorted(name for name, row in STRATEGIES.items() if row.start not in ("spawn", "fork"))
    assert faults(tmp_path, text + "sed: 3\nretries_without_progress: -1\n", "name.x=1", "nothing") == [
        "--set name.x=1: name has no keys",
        "--set nothing: write it as key=value, such as trainer.max_epochs=2",
        f"world.strategy: unknown strategy 'dpd': choose one of {', '.join(known)}",
        "world.processes: should be at least 1, not 0",
        "trainer.max_epochs: should be a whole number, not 'x'",
        "retries_without_progress: should be at least 0, not -1",
        "sed: is unknown, did you mean seed?",
    ]


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        (
            "snapshots.url=$HOME/runs",
            "snapshots.url: $HOME is not expanded here: write the value, or let the shell expand it, as in --set "
            'snapshots.url="..."',
        ),
        (
            "weights=s3://runs/${RUN}/best",
            "weights: ${RUN} is not expanded here: write the value, or let the shell expand it, as in --set "
            'weights="..."',
        ),
        (
            "folder=code/{date}",
            "folder: {date} is not expanded here: write the value, or let the shell expand it, as in --set "
            'folder="..."',
        ),
        ("snapshots.url=s3:/runs", "snapshots.url: s3:/runs is a folder called s3: here; a URL has two slashes: s3://"),
        ("snapshots.url=s3://", "snapshots.url: s3:// names no folder: write it out, as in s3://bucket/runs"),
        ("snapshots.url=''", "snapshots.url: String should have at least 1 character, not ''"),
        ("trainer.seed=1", "trainer.seed: has its place at the top of the job: seed"),
        ("trainer.strategy=ddp", "trainer.strategy: has its place under world: world.strategy"),
        ("trainer.snapshots={}", "trainer.snapshots: has its place at the top of the job: snapshots"),
        ("world.max_epochs=3", "world.max_epochs: has its place under trainer: trainer.max_epochs"),
        ("max_epochs=3", "max_epochs: has its place under trainer: trainer.max_epochs"),
        ("trainer.max_epoch=3", "trainer.max_epoch: is unknown, did you mean trainer.max_epochs?"),
        ("trainer.epochs=3", "trainer.epochs: is unknown, did you mean trainer.max_epochs?"),
        ("seed=None", "seed: should be a whole number, not 'None'; YAML's None is null"),
        ("monitor.every_step=3", "monitor.every_step: is unknown, did you mean snapshots.every_steps?"),
        (
            "world.zzz=3",
            "world.zzz: is unknown; here may stand accelerator, auto_select_gpus, devices, global_batch_size, gpus, "
            "grow_after_s, hang_timeout_s, hosts, lanes, launcher, node_timeout_s, nodes, on, on_args, "
            "preemption_notice, processes, "
            "rendezvous, startup_timeout_s, strategy, strategy_args, validation_timeout_s",
        ),
        ("world.strategy=single", "world: strategy single has one process, not 2; for more choose ddp"),
        ("world.gpus=0", "world: 0 gpus are the CPU: set accelerator: cpu"),
        (
            "world.gpus=[1]",
            "world: gpus [1] are 1 for 2 processes: each has one GPU, with dp and ddp2 as many as it is given",
        ),
        ("world={gpus: 1, accelerator: cpu}", "world: gpus is 1, and accelerator cpu: leave one out"),
        (
            "world={strategy: dp, gpus: 2, devices: 2}",
            "world: gpus is 2 and devices 2, which say the same thing: leave one out",
        ),
        (
            "world={gpus: [1], auto_select_gpus: true}",
            "world: auto_select_gpus chooses among GPUs, and gpus [1] names them: give a number, or leave it out",
        ),
        (
            "trainer.gradient_clip_algorithm=value",
            "trainer: gradient_clip_algorithm is value, and nothing is clipped: set gradient_clip_val",
        ),
        ("trainer.accelerator=cpu", "trainer.accelerator: has its place under world: world.accelerator"),
        ("world.lanes=6", "world: lanes: a power of two from 1 to 1024 is needed, not 6"),
        (
            "world={strategy: ddp, lanes: 2, processes: 4}",
            "world: 4 processes cannot share 2 lanes: a power of two up to 2 can",
        ),
        (
            "world={strategy: sharded, lanes: 8}",
            "world: lanes with strategy sharded: the strategies that add up lane by lane are single and ddp: leave "
            "lanes out, or use ddp",
        ),
        ("world.launcher=inline", "world: launcher inline starts one process, not 2; leave it out, or use spawn"),
        ("world.launcher=horovodrun", "world: launcher horovodrun does not go with strategy ddp: leave it out"),
        ("world.hosts=a:4", "world: hosts is for horovodrun, and strategy ddp is started by torchrun: leave hosts out"),
        (
            "world={strategy: horovod, processes: 9, hosts: 'a:4,b:4'}",
            "world: hosts a:4,b:4 have 8 slots, and there are 9 processes: make them equal",
        ),
        (
            "world={strategy: horovod, processes: 2, launcher: torchrun}",
            "world: launcher torchrun does not go with strategy horovod: leave it out",
        ),
        (
            "world.launcher=slurm",
            "world.launcher: unknown launcher 'slurm': choose one of horovodrun, inline, join, spawn, torchrun, "
            'or your own as "package.module:Class"',
        ),
        (
            "trainer.logger=csv",
            "trainer.logger: is unknown here: set loggers: tensorboard, mlflow, wandb; the run's metrics.csv has a "
            "row a step without any",
        ),
        (
            "world.strategy=auto",
            "world.strategy: there is no strategy 'auto' here: in a job set single for one process, ddp for several",
        ),
        (
            "trainer.sync_batchnorm=true",
            "trainer.sync_batchnorm: is unknown here: it is an argument of ddp: strategy_args={sync_batchnorm: true}",
        ),
        ("monitor=a", "monitor: should be keys and values, not 'a'; its keys are metric, mode, patience"),
        ("callbacks=[{}]", "callbacks.0.path: is missing"),
        (
            "callbacks=[{path: Mine}]",
            "callbacks.0.path: \"package.module:attribute\" is needed, such as model:Classifier, not 'Mine'",
        ),
        ("callbacks=[{path: m:Mine, arg: {}}]", "callbacks.0.arg: is unknown, did you mean callbacks.args?"),
        (
            "loggers=[tensorbord]",
            "loggers.0.path: unknown logger 'tensorbord': choose one of tensorboard, mlflow, wandb, or "
            "package.module:Class",
        ),
        ("loggers=tensorboard", "loggers: should be a list, not 'tensorboard'"),
        ("loggers=[{path: wandb, arg: {}}]", "loggers.0.arg: is unknown, did you mean loggers.args?"),
        ("callbacks=m:Mine", "callbacks: should be a list, not 'm:Mine'"),
        ("callbacks=['m:Mine']", "callbacks.0: should be keys and values, not 'm:Mine'; its keys are path, args"),
        ("trainer.gradient_clip_val=true", "trainer.gradient_clip_val: should be a number, not True"),
        ("module_args=[3]", "module_args: should be keys and values, not [3]"),
        ("seed=null", "seed: should be a whole number, or left out, not null"),
        ("name=a b", "name: should be letters, digits and . _ -, a letter or digit first, not 'a b'"),
        ("module=model.py:Net", "module: a module is named without .py: model:Net, not 'model.py:Net'"),
        ("trainer.max_epochs=null", "trainer: set max_epochs, max_steps or max_time: the training would never end"),
        ("module=model.py", "module: \"package.module:attribute\" is needed, such as model:Classifier, not 'model.py'"),
        (
            "trainer.val_check_interval=often",
            "trainer.val_check_interval: should be a number of batches, such as 100, or a share of an epoch, such as "
            "0.5: a clock would decide which weights are validated, not 'often'",
        ),
    ],
)
def test_a_fault_says_the_way_out(tmp_path: Path, override: str, fault: str) -> None:
    text = JOB + ("monitor: {metric: a}\n" if override.startswith("monitor") else "")
    assert faults(tmp_path, text, override) == [fault]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "name: [",
            "line 1, column 8: expected the node content, but found '<stream end>' while parsing a flow node, which "
            "began in line 1",
        ),
        (
            "world: {strategy: ddp\nseed: 3\n",
            "line 2, column 5: expected ',' or '}', but got ':' while parsing a flow mapping, which began in line 1",
        ),
        ("world:\n\tstrategy: ddp\n", "line 2, column 1: found a tab; indent with spaces"),
        ("", "is empty"),
        (f"name: {'[' * 3000}", "is nested deeper than a job can be"),
        ("- a", "keys and values are needed, not ['a']"),
        ("name: a\nseed: 1\nseed: 2\n", "line 3, column 1: 'seed' is given twice, first in line 2"),
        ("name: a\n---\nname: b\n", "line 2, column 1: a second document starts (---): a job is one document"),
        (
            "seed: !!python/name:os.system\n",
            "line 1, column 7: could not determine a constructor for the tag 'tag:yaml.org,2002:python/name:os.system'",
        ),
    ],
)
def test_files_that_are_no_jobs(tmp_path: Path, text: str, fault: str) -> None:
    assert faults(tmp_path, text) == [fault]


def test_a_file_in_another_encoding_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes("name: a\n# für\n".encode("latin-1"))
    with pytest.raises(JobError, match=r"line 2 is not UTF-8 \(byte 0xfc\): save the file as UTF-8"):
        TrainingJob.load(tmp_path / "job.yaml")


def test_a_name_of_a_run_fits_into_a_folder() -> None:
    job = TrainingJob.model_validate({"name": "a", "module": "m:A", "data": "m:B", "trainer": {"max_epochs": 1}})
    assert job.run_url("x" * 200)
    with pytest.raises(JobError, match=r"run x{20}\.\.\.: has 201 characters, and a folder's name at most 200"):
        job.run_url("x" * 201)


def test_a_missing_file() -> None:
    with pytest.raises(JobError, match=r"there is no such file\. `midstride init FOLDER` writes an example"):
        TrainingJob.load("nowhere/job.yaml")


@pytest.mark.parametrize(("name", "said"), [("", "is a folder. Name the job's file in it"), ("a.py", "is Python")])
def test_other_paths(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "a.py").write_text('"""A model."""\n\nimport torch\n')
    with pytest.raises(JobError, match=said):
        TrainingJob.load(tmp_path / name)


def test_keys_that_are_not_indented(tmp_path: Path) -> None:
    text = JOB.replace("trainer: {max_epochs: 5, precision: 32}", "trainer:\nmax_epochs: 5")
    assert text != JOB
    assert faults(tmp_path, text) == [
        "trainer: has no keys: indent them below it, such as max_epochs",
        "max_epochs: has its place under trainer: trainer.max_epochs",
    ]


def test_yaml_means_what_people_mean() -> None:
    text = "{a: 1e-3, b: 1:4, c: no, d: 012, e: 0x1f, f: .inf, g: 1.5, h: -3, i: null, j: true, k: '1'}"
    assert parse_yaml(text) | parse_yaml("{l: 0o17, m: 2026-01-31, n: =}") == {
        **{"a": 1e-3, "b": "1:4", "c": "no", "d": 12, "e": 31, "f": float("inf")},
        **{"g": 1.5, "h": -3, "i": None, "j": True, "k": "1", "l": 15, "m": "2026-01-31", "n": "="},
    }


@pytest.mark.parametrize(
    ("override", "run"),
    [
        ("snapshots.url=s3://bucket/prefix/", "s3://bucket/prefix/a"),
        ("snapshots=null", "{folder}/runs/a"),
        ("snapshots.url=~/runs", f"{Path.home()}/runs/a"),
    ],
)
def test_a_run_has_a_place(tmp_path: Path, override: str, run: str) -> None:
    assert TrainingJob.load(write(tmp_path), [override]).run_url("a") == run.format(folder=tmp_path)


def test_reading_a_job_loads_no_torch() -> None:
    code = "import sys, midstride.engine.launch.launch; print('torch' in sys.modules, 'prefect' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["False", "False"]


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)

#: what is made in place of a job file -> words of the error
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "aliases that multiply": (lambda path: path.write_text(LAUGHS), "has more than 100000 values"),
    "many levels": (lambda path: path.write_text("a: " + "[" * 150 + "]" * 150), "100 levels"),
    "a FIFO": (os.mkfifo, "it is no regular file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "it is no regular file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_job_file_is_refused(name: str, tmp_path: Path) -> None:
    make, words = WRONG[name]
    make(tmp_path / "job.yaml")
    with pytest.raises(JobError, match=words):
        TrainingJob.load(tmp_path / "job.yaml")


@pytest.mark.parametrize("option", ["tracking_uri", "nested.0"])
def test_a_logger_with_a_password_in_its_url_is_refused(option: str, tmp_path: Path) -> None:
    url = "https://me:hunter2@mlflow.example.org"
    args = f"{{tracking_uri: '{url}'}}" if option == "tracking_uri" else f"{{nested: ['{url}']}}"
    (tmp_path / "job.yaml").write_text(
        "name: a\nmodule: m:M\ndata: m:D\ntrainer: {max_steps: 1}\nloggers: [{path: mlflow, args: " + args + "}]\n"
    )
    with pytest.raises(JobError, match="holds a password") as error:
        TrainingJob.load(tmp_path / "job.yaml")
    assert "hunter2" not in str(error.value)
