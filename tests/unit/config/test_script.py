"""A job that names a script: what it may say, and what a module alone has."""

from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import JobError
from midstride.engine.jobs.portability import relative_paths
from midstride.engine.registry.nightly import date_errors, metric_of, with_date

pytestmark = pytest.mark.fast

JOB = "name: gpt\nscript: train.py\n"


def loaded(folder: Path, text: str = "", *overrides: str) -> TrainingJob:
    (folder / "job.yaml").write_text(JOB + text)
    return TrainingJob.load(folder / "job.yaml", overrides)


def test_a_script_needs_a_name_alone(tmp_path: Path) -> None:
    job = loaded(tmp_path, "args: [--layers, 12, ./data]\nworld: {processes: 2}")
    assert (job.args, job.code) == (("--layers", "12", f"{tmp_path}/data"), "train.py")
    assert (job.world.launched_by, relative_paths(job)) == ("torchrun", [])
    document = job.model_dump(mode="json")
    assert TrainingJob.model_validate(document) == job
    assert [*Draft202012Validator(TrainingJob.model_json_schema()).iter_errors(document)] == []
    assert loaded(tmp_path).world.launched_by == "inline"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("module: model:Net", "module is not for a script: train.py decides that itself"),
        ("trainer: {max_epochs: 3}", "trainer.max_epochs is not for a script"),
        ("world: {strategy: fully_sharded, processes: 2}", "world.strategy fully_sharded is not"),
        ("world: {lanes: 2}", "world.lanes is not"),
        ("snapshots: null", "snapshots is null"),
        ("callbacks: [{path: 'model:Mine'}]", "callbacks is not"),
        ("monitor: {metric: loss, patience: 2}", "monitor.patience is not"),
        ("args: [1, null]", "args: should be text"),
    ],
)
def test_options_of_modules_are_refused(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=words):
        loaded(tmp_path, text)


def test_a_module_has_no_script(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("{name: a, args: [x], module: 'm:A', data: 'm:B', trainer: {max_epochs: 1}}")
    with pytest.raises(JobError, match="args are the command line of a script"):
        TrainingJob.load(tmp_path / "job.yaml")
    with pytest.raises(JobError, match="a Python file"):
        loaded(tmp_path, "", "script=train")


@pytest.mark.parametrize("missing", ["module", "data", "trainer"])
def test_the_schema_wants_a_module_or_a_script(missing: str) -> None:
    document: dict[str, Any] = {"name": "a", "module": "m:A", "data": "m:B", "trainer": {}, "folder": "/x"}
    document["snapshots"] = {"url": "/runs"}
    checked = Draft202012Validator(TrainingJob.model_json_schema())
    assert [*checked.iter_errors(document)] == []
    del document[missing]
    assert missing in str([*checked.iter_errors(document)])
    assert [*checked.iter_errors({**document, "script": "train.py"})] == []


def test_a_night_fills_in_its_date(tmp_path: Path) -> None:
    job = loaded(tmp_path, "args: [--data, 's3://data/{date}']\nmonitor: {metric: val/loss}")
    assert with_date(job, "2026-03-01").args == ("--data", "s3://data/2026-03-01")
    assert [fault.partition(":")[0] for fault in date_errors(job)] == ["args.1"]
    assert metric_of(job) == "val/loss"
