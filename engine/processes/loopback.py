"""The loopback address, on which gloo listens in a world on one machine."""

import fcntl
import os
import socket
import struct
from collections.abc import Mapping

from midstride.engine.world import World

__all__ = ["ADDRESS", "free_port", "interface_towards", "interfaces", "is_loopback", "own_address", "rank_environments"]

ADDRESS = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # asks for an interface's address
#: what tells gloo, NCCL, tensorpipe and Horovod by which interface ranks talk
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def interfaces(environment: Mapping[str, str], by: str | None = None) -> dict[str, str]:
    """Return unset variables that make ranks use the loopback, or the interface `by`."""
    names = [name for _, name in socket.if_nameindex()]
    chosen = by or next((name for name in names if name in ("lo", "lo0")), None)
    return {name: chosen for name in _VARIABLES if name not in environment} if chosen else {}


def interface_towards(host: str) -> str | None:
    """Return the interface by which this machine reaches `host`; None if unknown."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        ours = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no address
                continue
            if found[20:24] == ours:
                return name
    return None


def own_address() -> str:
    """Return this machine's address for others: that of its route to the world, else its name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; no machine has this address
        except OSError:  # there is no such route
            return socket.gethostname()
        return str(probe.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Whether `host`, an address or a name, is this machine's loopback."""
    return host in ("localhost", "::1") or host.startswith("127.")


def free_port() -> int:
    """Return a port that is free now; callers retry with another if it is taken in the meantime."""
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return int(probe.getsockname()[1])


def rank_environments(size: int, meeting: str, base: Mapping[str, str] = os.environ) -> list[dict[str, str]]:
    """Return the environment of each rank of a world on this machine, as torchrun writes it.

    Args:
        size: of the world.
        meeting: path of the file in which the ranks meet.
        base: environment to start from.
    """
    for_others = {"MASTER_ADDR": ADDRESS, "MASTER_PORT": str(free_port())}  # libraries look there for a rank
    meeting_place = {World.MEETING: meeting, **for_others, **interfaces(base)}
    worlds = [World(rank=rank, size=size, local_rank=rank, local_size=size) for rank in range(size)]
    return [{**base, **meeting_place, **world.environment} for world in worlds]
