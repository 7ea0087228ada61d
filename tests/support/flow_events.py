"""Events as a Prefect server has them, and what is promised of them."""

from typing import Any

import httpx
from support.flow_runs import wait_for

from midstride.tasks.events import EVENTS, Event

BY_NAME = {kind.event: kind for kind in EVENTS}


def told(server: str, resource: str, name: str, least: int = 1) -> list[dict[str, Any]]:
    """Return the events called `name` about `resource`, newest first, once the server has so many of them."""

    def found() -> list[dict[str, Any]]:
        wanted = {"filter": {"event": {"name": [name]}, "resource": {"id": [resource]}}}
        answer = httpx.post(f"{server}/events/filter", json=wanted, timeout=100)
        events: list[dict[str, Any]] = answer.raise_for_status().json()["events"]
        return events if len(events) >= least else []

    return wait_for(found, f"{name} about {resource}")


def payload(event: dict[str, Any]) -> Event:
    """Return what it says, which is all that is documented and nothing else."""
    kind = BY_NAME[event["event"]]
    assert set(event["payload"]) == set(kind.model_fields)
    return kind.model_validate(event["payload"])
