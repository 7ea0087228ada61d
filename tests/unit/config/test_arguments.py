"""What a job passes by name is JSON, as it travels so, and is refused where it would arrive as something else."""

from pathlib import Path

import pytest
from unit.config.test_job import JOB, faults, write

from midstride.engine.config.job import TrainingJob


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("module_args: {best: .inf}", "module_args: best is inf, which JSON has no number for: use null, or a text"),
        ("data_args: {a: {b: [1, .nan]}}", "data_args: a.b.1 is nan, which JSON has no number for"),
        ("module_args: {x: !!set {a}}", "module_args: x is a set, {'a'}: a job travels as JSON, of texts, numbers"),
        ("module_args: {x: !!binary YQ==}", "module_args: x is a bytes, b'a': a job travels as JSON"),
        ("module_args: {x: {3: 4}}", "module_args: x is a mapping with the key 3: put it in quotes"),
        ("module_args: {x: &all [*all]}", "module_args: x.0 is part of what it holds itself"),
        ("callbacks: [{path: m:A, args: {x: .inf}}]", "callbacks.0.args: x is inf, which JSON has no number for"),
        ("loggers: [{tensorboard: {x: .inf}}]", "loggers.0.args: x is inf, which JSON has no number for"),
    ],
)
def test_arguments_that_json_would_change_are_refused(tmp_path: Path, text: str, fault: str) -> None:
    (found,) = faults(tmp_path, f"{JOB}{text}\n")
    assert found.startswith(fault)


def test_no_number_of_a_job_is_infinite(tmp_path: Path) -> None:
    assert faults(tmp_path, JOB, "snapshots={every_seconds: .inf}", "world.hang_timeout_s=.nan") == [
        "world.hang_timeout_s: should be a finite number, not nan",
        "snapshots.every_seconds: should be a finite number, not inf",
    ]


def test_what_arguments_share_is_written_out(tmp_path: Path) -> None:
    job = TrainingJob.load(write(tmp_path, JOB + "module_args: {a: &one [1, {b: 2}], c: *one}\n"))
    assert job.module_args == {"a": [1, {"b": 2}], "c": [1, {"b": 2}]}


def test_paths_and_tuples_of_code_are_texts_and_lists(tmp_path: Path) -> None:
    job = TrainingJob.load(write(tmp_path))
    made = TrainingJob.model_validate({**dict(job), "module_args": {"path": tmp_path, "sizes": (1, 2)}})
    assert made.module_args == {"path": str(tmp_path), "sizes": [1, 2]}
