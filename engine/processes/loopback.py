"""What a world of one machine listens on: the loopback, where no other machine reaches it.

Neither torch's store nor gloo ask who is there: a process that reaches them takes part.
"""

import os
import socket
from collections.abc import Mapping

__all__ = ["ADDRESS", "interfaces", "is_loopback"]

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
