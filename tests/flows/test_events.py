"""What a flow tells the server, read back from it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from flow_runs import wait_for
from prefect.events.worker import EventsWorker

from midstride.engine.errors import UserError
from midstride.engine.job import TrainingJob
from midstride.flows.train import train
from midstride.tasks.events import EVENTS, Happened, ModelPromoted, emit

Make = Callable[..., TrainingJob]
PAGE = Path(__file__).parents[2] / "docs" / "events.md"

#: flows and worlds start one after the other
pytestmark = pytest.mark.timeout(400)

BY_NAME = {kind.event: kind for kind in EVENTS}


def told(server: str, resource: str, name: str) -> list[dict[str, Any]]:
    """Return the events called `name` about `resource`, as the server has them, once there are any."""

    def found() -> list[dict[str, Any]]:
        wanted = {"filter": {"event": {"name": [name]}, "resource": {"id": [resource]}}}
        answer = httpx.post(f"{server}/events/filter", json=wanted, timeout=30)
        events: list[dict[str, Any]] = answer.raise_for_status().json()["events"]
        return events

    EventsWorker.instance().wait_until_empty()
    return wait_for(found, f"{name} about {resource}")  # type: ignore[no-any-return]


def payload(event: dict[str, Any]) -> Happened:
    """Return what it says, which is all that is documented and nothing else."""
    kind = BY_NAME[event["event"]]
    assert set(event["payload"]) == set(kind.model_fields)
    return kind.model_validate(event["payload"])


def test_a_run_that_fails_tells_the_cause(make_job: Make, server: str) -> None:
    job = make_job(processes=1, fail_at=2)
    with pytest.raises(UserError):
        train(job, "mournful")
    [failed] = told(server, "midstride.run.mournful", "midstride.run.failed")
    said = payload(failed).model_dump()
    assert (said["job"], said["outcome"], said["cause"]) == (
        "tiny",
        "user_error",
        "ValueError: the model is not in the mood",
    )


def test_a_promotion_is_about_the_model(server: str) -> None:
    happened = ModelPromoted(
        run="nightly-2026-03-01",
        date="2026-03-01",
        why="accuracy 0.93 against 0.91",
        metric="accuracy",
        challenger={"accuracy": 0.93},
        champion={"accuracy": 0.91},
    )
    emit(happened, {"prefect.resource.id": "midstride.model.digits"})
    [event] = told(server, "midstride.model.digits", "midstride.model.promoted")
    assert payload(event) == happened


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.event)
def test_the_page_says_what_each_event_says(kind: type[Happened]) -> None:
    page = PAGE.read_text()
    assert f"## `{kind.event}`" in page
    for name, field in kind.model_fields.items():
        assert f"| `{name}` | {field.description} |" in page
