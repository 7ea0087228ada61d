"""The `torch.distributed.Store` over which the ranks of a world connect."""

import fcntl
import os
import socket
import sys
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from midstride.engine import slurm
from midstride.engine.errors import JobError, WorldError
from midstride.engine.processes.loopback import ADDRESS, is_loopback
from midstride.engine.processes.process_identity import local_world_id
from midstride.engine.strategies.torch_internals import HashStore, PrefixStore, Store, TCPStore
from midstride.engine.world import World

__all__ = ["rendezvous_store", "serve_store", "serve_store_on"]

#: seconds to wait for the name of a machine to resolve: that of a pod resolves some time after its start
_KNOWN_S = 60.0
#: seconds in which all ranks of this machine connect: some may still import modules, or read their data
_CONNECTED_S = 1800.0


def rendezvous_store(world: World) -> Store | None:
    """Return the store over which the ranks connect; None if torch finds it by the launcher's variables.

    Raises:
        WorldError: the launcher gave ranks on several machines no address, its name does not resolve, or its port is
            taken.
        JobError: what is in MASTER_PORT is no port.
    """
    if number := os.environ.get(World.ROUND):
        # The launcher serves it and outlives every node; the prefix keeps ranks of earlier rounds apart.
        launcher = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        return PrefixStore(f"round/{number}/ranks", launcher)
    if "MASTER_ADDR" in os.environ:
        _wait_until_known(os.environ["MASTER_ADDR"], "MASTER_ADDR")
        return _loopback_store(world)
    if world.size == 1:
        return HashStore()
    if world.launcher == "srun":
        return _slurm_store(world)
    if world.nodes > 1:
        raise WorldError(
            f"{world.launcher} gave the ranks on {world.nodes} machines no address to meet at: hand every process "
            "MASTER_ADDR, rank 0's machine, and MASTER_PORT; with mpirun: -x MASTER_ADDR=... -x MASTER_PORT=29500"
        )
    return _local_store(world, Path(tempfile.gettempdir(), f"midstride-port-{os.getuid()}-{local_world_id()}"))


def _local_store(world: World, path: Path) -> TCPStore:
    """Return a store that rank 0 serves at a free port; the others find the port in the file `path`.

    Rank 0 keeps the file locked until all have connected, and removes it then: a file without a lock is what a world
    that was killed has left.

    Raises:
        WorldError: not all ranks have connected after half an hour.
    """
    others = [f"connected/{rank}" for rank in range(1, world.size)]
    if not world.is_first:
        store = TCPStore(ADDRESS, _read_port(path), is_master=False)
        store.set(others[world.rank - 1], "")
        return store
    store = serve_store()
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f"{path.name}.", delete=False) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(str(store.port))
        file.flush()
        Path(file.name).replace(path)
        try:
            store.wait(others, timedelta(seconds=_CONNECTED_S))
        finally:
            path.unlink()
    return store


def _read_port(path: Path) -> int:
    """Return the port that rank 0 has written into `path`, once it has."""
    until = time.monotonic() + _CONNECTED_S
    while time.monotonic() < until:
        with suppress(FileNotFoundError), path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read())
        time.sleep(0.01)
    raise WorldError(f"rank 0 wrote no port to meet at into {path} in {_CONNECTED_S:.0f} s; see what rank 0 printed")


def _loopback_store(world: World) -> Store | None:
    """Return the store at a loopback MASTER_ADDR; None if the address is another, or an agent serves the store."""
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if served or "MASTER_PORT" not in os.environ or not is_loopback(os.environ["MASTER_ADDR"]):
        return None
    port = os.environ["MASTER_PORT"]
    if not port.isdecimal() or not 0 < int(port) < 65_536:
        raise JobError(f"MASTER_PORT is {port!r}: a free port of rank 0's machine is needed, from 1 to 65535")
    store = _store_on_rank0(world, int(port))
    if world.nodes > 1:  # restart counts differ between agents, which choose a new port for each world
        return store
    return PrefixStore(f"restart/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _slurm_store(world: World) -> Store:
    """Return the store of a Slurm step, with a prefix that no other step, and no earlier requeue, has."""
    host, port, name = slurm.meeting_point(os.environ)
    if world.nodes == 1:
        return PrefixStore(name, _store_on_rank0(world, port))
    _wait_until_known(host, "the first machine of Slurm's step")
    return PrefixStore(name, TCPStore(host, port, is_master=world.is_first, wait_for_workers=False))


def _wait_until_known(host: str, what: str) -> None:
    """Wait until the name `host` resolves on this machine; print a line if it does not at once.

    Raises:
        WorldError: it did not resolve within a minute.
    """
    until: float | None = None
    while True:
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            why = f"no address is known for {host} ({what}), where the ranks meet: {error.strerror}"
            if until is None:
                print(f"{why}; waiting for {_KNOWN_S:.0f} s", file=sys.stderr, flush=True)
                until = time.monotonic() + _KNOWN_S  # from now on: the first lookup may have taken seconds
            elif time.monotonic() > until:
                way_out = "let that name resolve on every node, or hand all processes an address in MASTER_ADDR"
                raise WorldError(f"{why}; {way_out}, and a free port there in MASTER_PORT") from error
            time.sleep(_KNOWN_S / 100)
        else:
            return


def _store_on_rank0(world: World, port: int) -> TCPStore:
    if not world.is_first:
        return TCPStore(ADDRESS, port, is_master=False)
    try:
        return serve_store(port)
    except OSError as error:
        way_out = "end what listens there, or hand all processes another MASTER_PORT"
        raise WorldError(f"rank 0 cannot listen at port {port}: {os.strerror(error.errno or 0)}; {way_out}") from error


def serve_store(port: int = 0, host: str = ADDRESS) -> TCPStore:
    """Return a store that this process serves on `host`, by default the loopback, and `port`, by default a free one.

    By default, torch would listen on every interface of the machine.
    """
    return serve_store_on(socket.create_server((host, port), backlog=1024), host)


def serve_store_on(listener: socket.socket, host: str = ADDRESS) -> TCPStore:
    """Return a store that this process serves on a socket that listens on `host`; the store closes the socket."""
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
