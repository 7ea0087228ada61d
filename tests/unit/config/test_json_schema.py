"""The job's JSON schema: what a server draws a form from, and checks the parameters of a run by."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from midstride.engine.cli.project import schema
from midstride.engine.config.job import TrainingJob

SCHEMA = TrainingJob.model_json_schema()
VALIDATOR = Draft202012Validator(SCHEMA)


def document(**choices: Any) -> dict[str, Any]:
    """Return a job with every field, as a deployment stores it."""
    job = TrainingJob.model_validate(
        {"name": "tiny", "module": "model:Net", "data": "model:Data", "trainer": {"max_steps": 3}}
    )
    plain = job.resolved(Path("/srv/tiny")).model_dump(mode="json")
    for path, value in choices.items():
        *groups, last = path.split("__")
        values = plain
        for group in groups:
            values = values[group]
        values[last] = value
    return plain


def faults(job: dict[str, Any]) -> list[str]:
    return [f"{fault.json_path}: {fault.message}" for fault in VALIDATOR.iter_errors(job)]


def python_takes(job: dict[str, Any]) -> bool:
    try:
        TrainingJob.model_validate(job)
    except ValidationError:
        return False
    return True


def test_the_schema_is_one():
    Draft202012Validator.check_schema(SCHEMA)
    assert faults(document()) == []


def test_old_names_of_a_stored_job_are_read_and_never_shown():
    """A deployment made before has the schema of then, which knows the old name: only the flow has to take it."""
    job = document()
    job["retries"] = job.pop("retries_without_progress") + 2
    assert TrainingJob.model_validate(job).retries_without_progress == job["retries"]
    assert "retries" not in SCHEMA["properties"]


WORLDS = itertools.product(
    ("single", "dp", "ddp", "ddp2", "horovod", "pipeline", "mine.own:Strategy"),
    (1, 2),
    (None, 2),
    (None, "inline", "spawn", "torchrun", "horovodrun"),
    ("32", "16"),
    (None, "a:4,b:4"),
)


def test_the_schema_takes_every_world_that_python_takes():
    refused, taken = [], 0
    for strategy, processes, devices, launcher, precision, hosts in WORLDS:
        world = {"strategy": strategy, "processes": processes, "devices": devices, "launcher": launcher, "hosts": hosts}
        job = document(trainer__precision=precision)
        job["world"].update(world)
        if python_takes(job):
            taken += 1
            refused += [(world, precision, fault) for fault in faults(job)]
    assert refused == []
    assert taken > 20


@pytest.mark.parametrize(
    ("choices", "path", "words"),
    [
        ({"trainer__max_epochs": 0}, "$.trainer.max_epochs", "0 is"),
        ({"trainer__precision": "8"}, "$.trainer.precision", "'8' is not one of"),
        ({"seed": -1}, "$.seed", "less than the minimum of 0"),
        ({"name": "a b"}, "$.name", "does not match"),
        ({"module": "model.Net"}, "$.module", "does not match"),
        ({"world__strategy": "dpp"}, "$.world.strategy", "'dpp' is not valid under any"),
        ({"world__processes": 0}, "$.world.processes", "0 is"),
        ({"world__launcher": "slurm"}, "$.world.launcher", "'slurm' is not valid under any"),
        ({"world__hosts": "a"}, "$.world.hosts", "'a' is not valid under any"),
        ({"world__nodes": "2:"}, "$.world.nodes", "does not match"),
        ({"snapshots__url": "runs"}, "$.snapshots", "'runs'"),
        ({"snapshots__url": "sftp://me:secret@host/x"}, "$.snapshots", "'sftp://me:secret@host/x'"),
        ({"folder": ""}, "$.folder", "'' does not match '^/'"),
        ({"callbacks": [{"path": "model:Mine", "args": {"file": "./a"}}]}, "$.callbacks[0].args.file", "'./a' should"),
        ({"callbacks": [{"path": "Mine"}]}, "$.callbacks[0].path", "does not match"),
        ({"data_args": {"folder": "./data"}}, "$.data_args.folder", "'./data' should not be valid"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_bad_choice_is_refused_where_it_stands(choices: dict[str, Any], path: str, words: str):
    found = faults(document(**choices))
    assert any(fault.startswith(f"{path}: ") and words in fault for fault in found), found


@pytest.mark.parametrize("url", ["/srv/runs", "s3://bucket/runs", "file:///srv/runs", "sftp://me@host/runs"])
@pytest.mark.parametrize("rhythm", [{}, {"every_steps": 5}, {"every_seconds": 5.0}, {"overhead": 0.1}])
def test_good_snapshots_pass(url: str, rhythm: dict[str, Any]):
    job = document(snapshots__url=url)
    job["snapshots"].update(rhythm)
    assert faults(job) == []
    assert faults({**job, "snapshots": None}) == []


def through_a_browser(value: Any) -> Any:
    """Return what JavaScript makes of JSON: it has one kind of number, and writes 1.0 as 1."""
    if isinstance(value, dict):
        return {key: through_a_browser(item) for key, item in value.items()}
    if isinstance(value, list):
        return [through_a_browser(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@pytest.mark.parametrize("limit", [None, 1, 3, 0.5])
@pytest.mark.parametrize(
    "option", ["val_check_interval", "limit_train_batches", "limit_val_batches", "limit_test_batches"]
)
def test_a_job_comes_back_from_a_form_as_it_was(option: str, limit: float | None):
    job = document(**{f"trainer__{option}": limit})
    back = through_a_browser(job)
    assert faults(back) == []
    meant, read = (TrainingJob.model_validate(one) for one in (job, back))
    assert repr(read) == repr(meant)
    assert repr(getattr(read.trainer, option)) == repr(1.0 if limit is None else limit)


def fields(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    groups = [("job", schema), *schema["$defs"].items()]
    return [(f"{group}.{name}", field) for group, form in groups for name, field in form.get("properties", {}).items()]


@pytest.mark.parametrize(("path", "field"), fields(SCHEMA), ids=lambda value: value if isinstance(value, str) else "")
def test_every_field_has_a_title_and_a_description(path: str, field: dict[str, Any]):
    assert field.get("title"), path
    assert field.get("description") or "$ref" in field, path


def test_the_schema_of_files_takes_what_python_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "job.schema.json"
    assert schema(output=output) == 0
    assert f"$schema={output}" in capsys.readouterr().err
    validator = Draft202012Validator(json.loads(output.read_text()))
    plain = {"name": "tiny", "module": "model:Net", "data": "model:Data", "trainer": {"max_steps": 3}}
    changes: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"snapshots": {"url": "runs"}, "data_args": {"folder": "./data"}, "folder": ".."}, True),
        ({"snapshots": {"every_steps": 3}}, True),
        ({"loggers": ["mlflow", {"wandb": {"project": "a"}}, {"path": "mine:Logger"}, {"tensorboard": None}]}, True),
        ({"loggers": ["nope"]}, False),
        ({"loggers": [{"mine:Logger": {}}]}, False),
        ({"seed": -1}, False),
        ({"trainer": {"max_epoch": 3}}, False),
    ]
    for change, right in changes:
        assert validator.is_valid({**plain, **change}) == python_takes({**plain, **change}) == right, change
