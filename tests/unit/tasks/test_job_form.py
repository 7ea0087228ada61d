"""The form of a deployment: few fields in view, and a job is checked whatever the tab."""

from collections.abc import Callable
from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError, validate

from midstride.engine.config.job import TrainingJob
from midstride.flows.evaluate import evaluate
from midstride.flows.nightly import nightly
from midstride.flows.train import train

FLOWS: list[Callable[..., Any]] = [train.fn, nightly.fn, evaluate.fn]
JOB = {"name": "a", "module": "m:A", "data": "m:B", "trainer": {"max_epochs": 1}, "folder": "/x"}
WHOLE = TrainingJob.model_validate({**JOB, "snapshots": {"url": "/runs"}}).model_dump(mode="json")


def fields_of(schema: dict[str, Any]) -> int:
    """How many fields the UI draws: of an alternative the first, and an object without properties is one of JSON."""
    if "anyOf" in schema:
        return fields_of(schema["anyOf"][0])
    return sum(map(fields_of, schema["properties"].values())) if schema.get("properties") else 1


@pytest.mark.parametrize("flow", FLOWS)
def test_a_form_has_few_fields_in_view(flow: Callable[..., Any]) -> None:
    form = parameter_schema(flow).model_dump_for_openapi()
    assert fields_of(form) <= 15
    basics, others, _ = form["properties"]["job"]["anyOf"]
    assert set(WHOLE) > set(basics["properties"]), "the tab that opens, since its properties are those of a job"
    assert "properties" not in others, "which would open it"


@pytest.mark.parametrize(
    ("group", "key", "value", "said"),
    [
        ("world", "processes", 0, "'job.world.processes'. Failure reason: 0 is less than the minimum of 1"),
        ("snapshots", "url", "runs", "'job.snapshots.url'. Failure reason: 'runs' does not match"),
        ("", "seeed", 1, "'job'. Failure reason: Additional properties are not allowed ('seeed' was unexpected)"),
    ],
)
def test_a_job_is_checked_whatever_the_tab(group: str, key: str, value: object, said: str) -> None:
    form = parameter_schema(train.fn).model_dump_for_openapi()
    validate({"job": WHOLE}, form, raise_on_error=True)
    wrong = {**WHOLE, group: {**WHOLE[group], key: value}} if group else {**WHOLE, key: value}
    with pytest.raises(ValidationError) as caught:
        validate({"job": wrong}, form, raise_on_error=True)
    assert said in str(caught.value)
