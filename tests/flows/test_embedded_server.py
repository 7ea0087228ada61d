"""An embedded server that does not start is told from one that is slow; what it said is shown."""

from contextlib import nullcontext

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS, temporary_settings

from midstride.flows import server

#: what is served, seconds given to it, what is said
STARTS = {
    "it cannot be imported": (
        "no_such_module:create_app",
        60,
        "ended before it answered(.|\n)*no_such_module(.|\n)*in PREFECT_HOME, now /",
    ),
    "it is slow": (server._APPLICATION, 0, "did not answer within 0 s(.|\n)*give it longer"),
}


@pytest.mark.parametrize("case", STARTS)
def test_a_server_that_does_not_start_says_why(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    application, given_s, words = STARTS[case]
    monkeypatch.setattr(server, "_APPLICATION", application)
    settings = {PREFECT_API_URL: None, PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS: given_s}
    said = pytest.raises(server.ServerError, match=words)
    with temporary_settings(settings), said, server.api(lambda text: nullcontext()):
        pass
