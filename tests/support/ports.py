"""Ports for servers of tests: below those that the kernel deals out, so that no connection of another takes them."""

import itertools
import os
import random
import socket

#: a server that speaks gRPC takes that port so much above its own as well
NEIGHBOUR = 10_000
#: the kernel deals out ports from 32,768 on; the neighbours of these lie below that, and below torch's own 29,500
_PORTS = range(10_000, 19_000)
#: a worker of the test run has every 16th port, as servers of two of them may start at the same moment
_WORKERS = 16


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback, free and with a free neighbour, that stay free while nobody listens there.

    Raises:
        AssertionError: too few are free.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
    own = _PORTS[worker::_WORKERS]
    ports = [*itertools.islice(filter(_is_free, random.sample(own, len(own))), count)]
    assert len(ports) == count, f"{count} ports are asked for, and {len(ports)} of {len(own)} are free"
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as own, socket.socket() as neighbour:
        try:
            own.bind(("127.0.0.1", port))
            neighbour.bind(("127.0.0.1", port + NEIGHBOUR))
        except OSError:
            return False
    return True
