"""A world of forked ranks in which Horovod finds itself as under horovodrun, without horovodrun's seconds."""

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import pytest

from midstride.engine.testing import run_ranks

_MISSING = "Horovod is not installed: `make horovod` compiles it"
#: for tests that start it in their own way; `run_horovod_ranks` skips on its own
needs_horovod = pytest.mark.skipif(find_spec("horovod") is None, reason=_MISSING)
#: the strategy as a row of a table
HOROVOD = pytest.param("horovod", marks=needs_horovod)


def run_horovod_ranks(
    target: Callable[..., None], *arguments: Any, processes: int, environment: Mapping[str, str] = os.environ
) -> list[int]:
    """Call `target(*arguments)` in `processes` forked ranks that Horovod joins; return their exit codes."""
    hosts = pytest.importorskip("horovod.runner.common.util.hosts", reason=_MISSING)
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    try:
        server.init(hosts.get_host_assignments(hosts.parse_hosts(f"localhost:{processes}"), processes))
        return run_ranks(_join, port, target, arguments, processes=processes, environment=environment)
    finally:
        server.stop()
        server._httpd.server_close()  # `stop` leaves its socket open


def _join(port: int, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    os.environ.update(
        HOROVOD_HOSTNAME="localhost",
        HOROVOD_RANK=rank,
        HOROVOD_SIZE=size,
        HOROVOD_LOCAL_RANK=rank,
        HOROVOD_LOCAL_SIZE=size,
        HOROVOD_CROSS_RANK="0",
        HOROVOD_CROSS_SIZE="1",
        HOROVOD_GLOO_RENDEZVOUS_ADDR="127.0.0.1",
        HOROVOD_GLOO_RENDEZVOUS_PORT=str(port),
        HOROVOD_GLOO_IFACE="lo",
        HOROVOD_GLOO_TIMEOUT_SECONDS="90",
        HOROVOD_CONTROLLER="gloo",
        HOROVOD_CYCLE_TIME="5",  # milliseconds; at each, all ranks tell each other that there is nothing to do
        HOROVOD_CPU_OPERATIONS="gloo",
    )
    target(*arguments)
