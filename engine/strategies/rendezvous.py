"""Where the ranks of a process group meet: in a store of torch's."""

import os
import socket
import sys
import time

from midstride.engine import slurm
from midstride.engine.errors import WorldError
from midstride.engine.processes.loopback import ADDRESS, is_loopback
from midstride.engine.strategies.torch_internals import HashStore, PrefixStore, Store, TCPStore
from midstride.engine.world import World

__all__ = ["rendezvous_store", "serve_store"]

#: for which a machine's name may be new: that of a pod is known a little after its start
_KNOWN_S = 60.0


def rendezvous_store(world: World) -> Store | None:
    """Return where the ranks meet; None if torch finds that out from their launcher's variables."""
    if number := os.environ.get(World.ROUND):
        # With the launcher, who outlives every node; ranks of an earlier round are left to themselves.
        launcher = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        return PrefixStore(f"round/{number}/ranks", launcher)
    if "MASTER_ADDR" in os.environ:
        _wait_until_known(os.environ["MASTER_ADDR"], "MASTER_ADDR")
        return _on_this_machine(world)
    if world.size == 1:
        return HashStore()
    if world.launcher == "srun":
        return _in_step(world)
    if world.nodes > 1:
        raise WorldError(
            f"{world.launcher} gave the ranks on {world.nodes} machines no address to meet at: hand every process "
            "MASTER_ADDR, rank 0's machine, and MASTER_PORT; with mpirun: -x MASTER_ADDR=... -x MASTER_PORT=29500"
        )
    # Something that all ranks of this machine know and no other world does.
    common = int(os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", os.getppid()))
    return _served_by_first(world, 20000 + (common + 1) % 20000)


def _on_this_machine(world: World) -> Store | None:
    """The store of ranks that were told a loopback address, where it is rank 0 who serves it."""
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if served or "MASTER_PORT" not in os.environ or not is_loopback(os.environ["MASTER_ADDR"]):
        return None
    store = _served_by_first(world, int(os.environ["MASTER_PORT"]))
    if world.nodes > 1:  # each agent counts its own restarts; they choose a port for each world
        return store
    return PrefixStore(f"restart/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _in_step(world: World) -> Store:
    """The store of a Slurm step: other steps of the job, and the step before a requeue, have others."""
    host, port, name = slurm.meeting_point(os.environ)
    if world.nodes == 1:
        return PrefixStore(name, _served_by_first(world, port))
    _wait_until_known(host, "the first machine of Slurm's step")
    return PrefixStore(name, TCPStore(host, port, is_master=world.is_first, wait_for_workers=False))


def _wait_until_known(host: str, what: str) -> None:
    """Wait until this machine knows an address of `host`, and say so if it does not.

    Raises:
        WorldError: it has not learned one in a minute.
    """
    until: float | None = None
    while True:
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            why = f"no address is known for {host} ({what}), where the ranks meet: {error.strerror}"
            if until is None:
                print(f"{why}; waiting for {_KNOWN_S:.0f} s", file=sys.stderr, flush=True)
                until = time.monotonic() + _KNOWN_S  # to look it up may have taken seconds itself
            elif time.monotonic() > until:
                way_out = "let that name resolve on every node, or hand all processes an address in MASTER_ADDR"
                raise WorldError(f"{why}; {way_out}, and a free port there in MASTER_PORT") from error
            time.sleep(_KNOWN_S / 100)
        else:
            return


def _served_by_first(world: World, port: int) -> TCPStore:
    return serve_store(port) if world.is_first else TCPStore(ADDRESS, port, is_master=False)


def serve_store(port: int = 0, host: str = ADDRESS) -> TCPStore:
    """Return a store that this process serves on the loopback, or by `host`; at a free port, if none is given.

    torch's own choice is every interface of the machine.
    """
    listener = socket.create_server((host, port), backlog=1024)
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
