"""How long the end of a flow waits for Prefect's server, and what it says."""

from collections.abc import Iterator

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from support.ports import free_ports

from midstride.tasks import server_outage
from midstride.tasks.server_outage import ServerLost, await_server, server_ended_if


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return what is said of a server that does not answer; time passes quickly."""
    lines: list[str] = []
    monkeypatch.setattr(server_outage, "warn", lines.append)
    monkeypatch.setattr(server_outage, "stop_if_asked", lambda: None)
    monkeypatch.setattr(server_outage, "ASKED_EVERY_S", 0.0)
    monkeypatch.setattr(server_outage, "AWAITED_S", 0.1)
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{free_ports(1)[0]}/api"}):
        yield lines
    server_outage._given_up.clear()


def test_a_server_that_stays_away_is_waited_for_once(said: list[str]) -> None:
    assert not await_server()
    assert [line.partition(":")[2] for line in said] == [
        " the flow waits for it, up to 0 minutes",
        " the flow ends without it",
    ]
    assert not await_server()
    assert len(said) == 2, "nothing is said twice"


def test_a_server_that_comes_back_is_waited_for_again(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, False, True, True, False])
    monkeypatch.setattr(server_outage, "AWAITED_S", 600.0)
    monkeypatch.setattr(server_outage, "is_server_up", lambda: next(answers))
    assert await_server()
    assert said[-1] == "Prefect's server answers again"
    assert await_server()
    monkeypatch.setattr(server_outage, "AWAITED_S", 0.0)
    assert not await_server()


def test_a_server_that_has_ended_is_not_waited_for(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_outage, "AWAITED_S", 600.0)
    with server_ended_if(lambda: True):
        assert not await_server()
    assert said == ["Prefect's server has ended: the flow ends without it"]


@pytest.mark.parametrize(("result", "word"), [("a report", "done"), (ValueError(), "failed")])
def test_a_flow_without_a_server_keeps_its_result(result: object, word: str) -> None:
    lost = ServerLost(result)
    assert lost.result is result
    assert f"the run is {word}, and Prefect's server was not told" in str(lost)
