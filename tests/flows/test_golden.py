"""Words that a Prefect server holds: deployments, automations and dashboards of older versions know them."""

from importlib import import_module

import pytest

from midstride.flows.deployment import FLOWS, TAG
from midstride.flows.server_setup import ZOMBIES
from midstride.tasks.events import EVENTS

#: event: its payload
PAYLOADS = {
    "midstride.run.resumed": "run generation snapshot step",
    "midstride.round.begun": "run number nodes ranks why",
    "midstride.snapshot.committed": "run name step bytes stall_s epoch wait_s write_s state",
    "midstride.store.awaited": "run rank waited_s why",
    "midstride.run.finished": "run job steps restarts test ended_by why",
    "midstride.run.stopped": "run job cause steps",
    "midstride.run.failed": "run job outcome cause steps",
    "midstride.model.promoted": "run weights date why metric mode margin challenger champion over",
    "midstride.model.rolled_back": "run weights after",
}


def test_events_have_these_names_and_payloads() -> None:
    assert {kind.event: set(kind.model_fields) for kind in EVENTS} == {
        event: set(words.split()) for event, words in PAYLOADS.items()
    }


@pytest.mark.parametrize(("name", "second"), [("train", "run"), ("nightly", "date")])
def test_a_deployment_enters_here(name: str, second: str) -> None:
    assert FLOWS[name] == f"midstride.flows.{name}:{name}"
    flow = getattr(import_module(f"midstride.flows.{name}"), name)
    assert (flow.name, [*flow.parameters.properties][:2]) == (name, ["job", second])


def test_a_server_finds_what_was_made_before_by_these_names() -> None:
    assert TAG == "midstride"
    assert ZOMBIES == "midstride: a flow run without a heartbeat has crashed"
