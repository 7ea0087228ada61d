"""`midstride setup-server`: it may be given again and again, and what it makes does what it is for."""

from collections.abc import Iterator

import pytest
from prefect import get_client
from prefect.events.schemas.automations import Automation
from prefect.settings import PREFECT_API_URL, temporary_settings

from midstride.engine.cli.app import main
from midstride.flows.cli import app
from midstride.flows.deployment import TAG
from midstride.flows.server import ServerError, need_server
from midstride.flows.server_setup import ZOMBIES, ensure_zombie_automation


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
    assert ensure_zombie_automation(540).startswith("automation created")
    [first] = automations()
    assert first.trigger.match_related.model_dump() == {"prefect.resource.id": [f"prefect.tag.{TAG}"]}
    assert ensure_zombie_automation(540).startswith("automation is there")
    assert [one.id for one in automations()] == [first.id]
    assert ensure_zombie_automation(90).startswith("automation changed")
    [changed] = automations()
    assert (changed.id, changed.trigger.within.total_seconds()) == (first.id, 90)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://127.0.0.1:9/api", "Connection refused"),
        ("127.0.0.1:4200/api", "missing an 'http://' or 'https://' protocol"),
        ("{server}/nowhere", "404 Not Found"),
    ],
)
def test_a_server_that_is_not_there_is_named(server: str, address: str, said: str) -> None:
    address = address.format(server=server)
    with temporary_settings({PREFECT_API_URL: address}), pytest.raises(ServerError) as caught:
        need_server()
    told, remedy = str(caught.value).splitlines()
    assert told.startswith(f"the Prefect server at {address} does not answer: ")
    assert said in told
    assert "set PREFECT_API_URL=" in remedy


def test_the_command_says_what_it_did(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("automation created: after 540 s", "pool created: depot"), ("automation is there", "pool is there"):
        with pytest.raises(SystemExit) as ended:
            main(app, ["setup-server", "--pool", "depot"])
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        for word in words:
            assert word in shown
