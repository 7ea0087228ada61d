"""`midstride setup-server`: it may be given again and again, and what it makes does what it is for."""

from collections.abc import Iterator

import pytest
from prefect import get_client
from prefect.events.schemas.automations import Automation

from midstride.engine.cli import main
from midstride.flows.cli import app
from midstride.flows.deployment import TAG
from midstride.flows.self_hosted import ZOMBIES, crash_zombies


@pytest.fixture(autouse=True)
def _clean(server: str) -> Iterator[None]:
    yield
    with get_client(sync_client=True) as client:
        for one in client.read_automations_by_name(ZOMBIES):
            client.delete_automation(one.id)


def automations() -> list[Automation]:
    with get_client(sync_client=True) as client:
        return client.read_automations_by_name(ZOMBIES)


def test_it_is_made_once_and_changed_when_the_beat_does(server: str) -> None:
    assert crash_zombies(540).startswith("automation created")
    [first] = automations()
    assert first.trigger.match_related.model_dump() == {"prefect.resource.id": [f"prefect.tag.{TAG}"]}
    assert crash_zombies(540).startswith("automation is there")
    assert [one.id for one in automations()] == [first.id]
    assert crash_zombies(90).startswith("automation changed")
    [changed] = automations()
    assert (changed.id, changed.trigger.within.total_seconds()) == (first.id, 90)


def test_the_command_says_what_it_did(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("automation created: after 540 s", "pool created: depot"), ("automation is there", "pool is there"):
        with pytest.raises(SystemExit) as ended:
            main(app, ["setup-server", "--pool", "depot"])
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        for word in words:
            assert word in shown
