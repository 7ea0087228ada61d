"""Notices that a spot machine will be taken away, as the clouds word them."""

from dataclasses import replace
from queue import SimpleQueue

import pytest
from support.limit import LIMIT_S
from support.metadata_server import metadata_server

from midstride.engine.launch import preemption
from midstride.engine.launch.preemption import PROVIDERS, PreemptionWatch

NOTICES = {
    "aws": "terminate at 2017-09-18T08:22:00Z",
    "gcp": "preempted",
    "azure": "Preempt not before Mon, 19 Sep 2016 18:29:47 GMT",
}


@pytest.mark.parametrize("cloud", PROVIDERS)
def test_a_notice_is_read_as_the_cloud_words_it(cloud: str) -> None:
    with metadata_server(cloud) as server, pytest.MonkeyPatch.context() as patch:
        variable = PROVIDERS[cloud].host_variable
        if variable:
            patch.setenv(variable, f"http://{server.address}" if cloud == "aws" else server.address)
        provider = PROVIDERS[cloud] if variable else replace(PROVIDERS[cloud], url=f"http://{server.address}")
        assert provider.ask() == ""
        server.preempted = True
        assert provider.ask() == NOTICES[cloud]
        assert server.asked == 2


def test_a_notice_is_reported_once_and_a_lost_server_is_harmless() -> None:
    told: SimpleQueue[str] = SimpleQueue()
    silent: SimpleQueue[str] = SimpleQueue()
    with metadata_server("aws") as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(preemption, "_POLL_S", 0.01)
        patch.setenv("GCE_METADATA_HOST", server.address)  # of another cloud: every answer is an error
        with PreemptionWatch("gcp", told.put, silent.put) as watch:
            assert "world.preemption_notice: gcp: its metadata server does not say" in silent.get(timeout=LIMIT_S)
            server.cloud, server.preempted = "gcp", True
            assert told.get(timeout=LIMIT_S) == "gcp announces that this machine will be taken away: preempted"
            watch._thread.join()
        assert (told.empty(), silent.empty()) == (True, True)


def test_without_a_cloud_no_thread_is_started() -> None:
    with PreemptionWatch(None, print, print) as watch:
        assert not watch._thread.is_alive()
