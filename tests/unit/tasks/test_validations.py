"""The line of a validation in a run's log, and names under which Prefect keeps what belongs to a run."""

import math
from typing import Any

import pytest

from midstride.engine.config.options import MonitorOptions
from midstride.engine.session.events import Event
from midstride.tasks.monitor import Validations
from midstride.tasks.resources import artifact_key, resource

#: mode of the monitor, the value of each validation, what the last line says of the best ("" for nothing); and what
#: earlier attempts found best, at which step
BESTS: dict[str, tuple[str | None, list[float], str] | tuple[str | None, list[float], str, tuple[float, int]]] = {
    "no monitor": (None, [1.0], ""),
    "the first": ("min", [1.0], " (best so far)"),
    "a better one": ("min", [2.0, 1.0], " (best so far)"),
    "a worse one": ("min", [1.0, 2.0], " (best so far: 1 at step 1)"),
    "an equal one": ("min", [1.0, 1.0], " (best so far: 1 at step 1)"),
    "larger is better": ("max", [1.0, 2.0], " (best so far)"),
    "no number": ("min", [1.0, math.nan], ""),
    "after no number": ("max", [math.inf, 2.0], " (best so far)"),
    "worse than before a retry": ("min", [3.0, 2.0], " (best so far: 1 at step 0)", (1.0, 0)),
    "better than before a retry": ("min", [3.0, 0.5], " (best so far)", (1.0, 0)),
    "the same again after a retry": ("min", [2.0, 1.0], " (best so far)", (1.0, 2)),
    "a best that the retry has not come to yet": ("min", [2.0], " (best so far)", (1.0, 2)),
}


def validation(step: int, value: float) -> Event:
    fields: dict[str, Any] = {"step": step, "epoch": 0, "metrics": {"val/loss": value}}
    return Event("validation", 0.0, fields)


@pytest.mark.parametrize("case", BESTS)
def test_a_line_says_whether_it_is_the_best(case: str) -> None:
    mode, values, best, *before = BESTS[case]
    monitor = None if mode is None else MonitorOptions(metric="val/loss", mode=mode)  # type: ignore[arg-type]
    validations = Validations(monitor, *before)
    lines = [validations.line(validation(step, value)) for step, value in enumerate(values, 1)]
    head, _, rest = lines[-1].partition(" (")
    assert head.startswith(f"validation at step {len(values)}, epoch 0: val/loss ")
    assert best == (f" ({rest}" if rest else "")


def test_a_value_that_is_not_monitored_is_no_best() -> None:
    line = Validations(MonitorOptions(metric="val/error", mode="min")).line(validation(1, 1.0))
    assert line == "validation at step 1, epoch 0: val/loss 1"


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("/data/runs/Digits_7", "digits-7-report"),
        ("s3://bucket/a/b.c/", "b-c-report"),
        ("/runs/684f55e0-7a6c-4c5b-abd6-57172dac4886", "684f55e0-report"),
    ],
)
def test_keys_of_artifacts_are_such_as_prefect_allows(url: str, key: str) -> None:
    assert artifact_key(url, "report") == key


def test_a_run_is_one_resource_wherever_its_url_ends() -> None:
    assert resource("/data/runs/digits-7/") == {
        "prefect.resource.id": "midstride.run.digits-7",
        "prefect.resource.name": "digits-7",
        "midstride.url": "/data/runs/digits-7/",
    }
