"""What works from here only is found before it is deployed."""

from pathlib import Path

import pytest

from midstride.engine.config.job import CallbackOptions, TrainingJob
from midstride.engine.jobs.portability import portability_errors, relative_paths

CODE = """
from midstride.engine import DataModule, TrainingModule

class Net(TrainingModule):
    pass

class Data(DataModule):
    def __init__(self, folder: str = "", labels: dict | None = None) -> None:
        super().__init__()
"""


@pytest.fixture
def job(tmp_path: Path) -> TrainingJob:
    """A job whose code is beside its file, with a folder of data there, too."""
    (tmp_path / "here_model.py").write_text(CODE)
    (tmp_path / "images").mkdir()
    (tmp_path / "job.yaml").write_text(
        "{name: tiny, module: here_model:Net, data: here_model:Data, trainer: {max_steps: 3}}"
    )
    return TrainingJob.load(tmp_path / "job.yaml")


def test_a_job_from_a_file_holds_anywhere(job: TrainingJob):
    assert relative_paths(job) == []
    assert portability_errors(job) == []


@pytest.mark.usefixtures("forked_worlds")
def test_nights_need_a_test(job: TrainingJob):
    [fault] = portability_errors(job, nightly=True)
    assert fault == "module: here_model:Net has no test_step, so challengers cannot be compared"


def test_every_relative_path_is_named(job: TrainingJob):
    snapshots = job.snapshots and job.snapshots.model_copy(update={"url": "runs"})
    data_args = {"folder": "../images", "labels": {"files": ["./a.csv", "s3://bucket/b.csv", "/srv/c.csv"]}}
    callbacks = (CallbackOptions(path="here_model:Mine", args={"file": "./b.csv"}),)
    typed = job.model_copy(
        update={"folder": "", "snapshots": snapshots, "data_args": data_args, "callbacks": callbacks}
    )
    found = [fault.partition(" is relative")[0] for fault in relative_paths(typed)]
    assert found == [
        "folder: '.'",
        "snapshots.url: 'runs'",
        "data_args.folder: '../images'",
        "data_args.labels.files.0: './a.csv'",
        "callbacks.0.args.file: './b.csv'",
    ]


def test_a_deployment_refuses_code_that_only_this_shell_finds(job: TrainingJob, tmp_path: Path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "only_in_this_shell.py").write_text(CODE)
    moved = job.model_copy(update={"module": "only_in_this_shell:Net"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path / "lib"))
        [fault] = portability_errors(moved)
    assert "there is no module 'only_in_this_shell'" in fault
    assert f"put it into {job.folder}" in fault
