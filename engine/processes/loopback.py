"""What a world of one machine listens on: the loopback, where no other machine reaches it.

Neither torch's store nor gloo ask who is there: a process that reaches them takes part.
"""

import os
import socket
from collections.abc import Mapping

from midstride.engine.world import World

__all__ = ["ADDRESS", "free_port", "interfaces", "is_loopback", "rank_environments"]

ADDRESS = "127.0.0.1"
#: what tells gloo, NCCL, tensorpipe and Horovod by which interface ranks talk
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def interfaces(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that have ranks of one machine talk over its loopback, but for those that are set."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    return {name: loopback for name in _VARIABLES if name not in environment} if loopback else {}


def is_loopback(host: str) -> bool:
    """Whether `host`, an address or a name, is this machine's loopback."""
    return host in ("localhost", "::1") or host.startswith("127.")


def free_port() -> int:
    """Return a port that is free now; who needs it tries again with another, should it be taken meanwhile."""
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return int(probe.getsockname()[1])


def rank_environments(
    size: int, port: int, *, is_served: bool, base: Mapping[str, str] = os.environ
) -> list[dict[str, str]]:
    """Return the environment of each rank of a world on this machine, as torchrun would write it.

    Args:
        size: of the world.
        port: of the loopback, where the ranks meet in a store.
        is_served: the process that starts the ranks serves the store; else rank 0 does.
        base: what the environments are made from.
    """
    served = {"TORCHELASTIC_USE_AGENT_STORE": "True"} if is_served else {}
    meeting = {"MASTER_ADDR": ADDRESS, "MASTER_PORT": str(port), **served, **interfaces(base)}
    worlds = [World(rank=rank, size=size, local_rank=rank, local_size=size) for rank in range(size)]
    return [{**base, **meeting, **world.environment} for world in worlds]
