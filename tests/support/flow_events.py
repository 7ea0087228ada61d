"""Events as a Prefect server has them, and what is promised of them."""

from typing import Any

import httpx
from support.flow_runs import wait_for

from midstride.tasks.events import EVENTS, Event

BY_NAME = {kind.event: kind for kind in EVENTS}


def told(server: str, resource: str, name: str, least: int = 1) -> list[dict[str, Any]]:
    """Return the events called `name` about `resource`, newest first, once the server has so many of them."""
    wanted = {"filter": {"event": {"name": [name]}, "resource": {"id": [resource]}}}
    with httpx.Client(timeout=100) as client:

        def found() -> list[dict[str, Any]]:
            answer = client.post(f"{server}/events/filter", json=wanted)
            events: list[dict[str, Any]] = answer.raise_for_status().json()["events"]
            return events if len(events) >= least else []

        return wait_for(found, f"{name} about {resource}")  # type: ignore[no-any-return]


def payload(event: dict[str, Any]) -> Event:
    """Return what it says, which is all that is documented and nothing else."""
    kind = BY_NAME[event["event"]]
    assert set(event["payload"]) == set(kind.model_fields)
    return kind.model_validate(event["payload"])


def said(server: str, run: str, event: str) -> list[dict[str, Any]]:
    """Return what the events about a run say, oldest first."""
    found = told(server, f"midstride.run.{run}", f"midstride.{event}")
    return [payload(one).model_dump() for one in reversed(found)]
