"""The `torch.distributed.Store` over which the ranks of a world connect.

On one machine that is a file which only their user can open. On several it is a store at a port.
"""

import fcntl
import io
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist

from midstride.engine import slurm
from midstride.engine.errors import JobError, WorldError
from midstride.engine.processes.loopback import ADDRESS, is_loopback
from midstride.engine.processes.process_identity import has_ended, local_world_id, process_identity
from midstride.engine.session.private_file import AnonymousFile, open_own, own_folder
from midstride.engine.strategies.peers import check_peers
from midstride.engine.strategies.torch_internals import (
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    check_new_groups,
    file_of,
    meet_in,
)
from midstride.engine.world import World

__all__ = ["SharedValues", "local_store", "rendezvous_store", "serve_store", "shared_values"]

#: seconds to wait for the name of a machine to resolve: that of a pod resolves some time after its start
_KNOWN_S = 60.0
#: seconds in which all ranks of this machine connect: some can still import modules, or read their data
_CONNECTED_S = 1800.0
#: seconds after which a rank that waits says so
_SILENT_S = 10.0
#: how the names of files begin that tell where ranks meet
_MEETINGS = "ranks-"


class Meeting:
    """The file in which the ranks of this machine meet, with a store for each time that they do.

    Args:
        file: the same for all of them.
    """

    #: that which the process that has started this one named, once it was read
    _named: ClassVar["Meeting | None"] = None
    #: the files of all meetings by their paths. They stay open: a `FileStore` writes to its path as it is destroyed
    _files: ClassVar[dict[str, AnonymousFile]] = {}

    def __init__(self, file: AnonymousFile) -> None:
        self._path, self._stores = file.path, 0
        self._files[file.path] = file

    @classmethod
    def named(cls) -> "Meeting | None":
        """Return the meeting named by `World.MEETING`, if any and this process is a rank of it.

        The variable is used once: programs that a rank starts do not meet there.
        """
        if World.MEETING not in os.environ and cls._named is None:
            return None
        if World.from_environment().launcher not in ("torchrun", "midstride"):
            return None
        if path := os.environ.pop(World.MEETING, ""):
            cls._named = cls(AnonymousFile.at(path))
        return cls._named

    def store(self) -> Store:
        """Return an empty store; all ranks call this equally often."""
        self._stores += 1
        return PrefixStore(f"{self._stores}", FileStore(self._path, -1))

    @classmethod
    def has(cls, store: Store) -> bool:
        """Whether `store` is that of a meeting."""
        return file_of(store) in cls._files


def _store_of_named() -> Store | None:
    meeting = Meeting.named()
    return None if meeting is None else meeting.store()


def _check_if_private(group: Any, store: Store) -> None:
    if Meeting.has(store):
        check_peers(group, store)


# Also for groups that the user's code makes, or a library.
meet_in(_store_of_named)
check_new_groups(_check_if_private)


def shared_values(store: Store, rank: int, size: int) -> Any:
    """Return a store for changing values.

    All ranks, `size` in number, call this with the same unused `store`.
    """
    return SharedValues.of_ranks(store, rank, size) if Meeting.has(store) else store


def rendezvous_store(world: World) -> Store | None:
    """Return the store that connects the ranks; None if torch finds it by the environment.

    Raises:
        WorldError: the launcher gave ranks on several machines no address, its name does not resolve, or its port is
            taken.
        JobError: MASTER_PORT is no port.
    """
    if number := os.environ.get(World.ROUND):
        # The launcher serves it and outlives every node; the prefix keeps ranks of earlier rounds apart.
        launcher = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        return PrefixStore(f"round/{number}/ranks", launcher)
    if (meeting := Meeting.named()) is not None:
        store = meeting.store()
        store.set(_connected(world.rank), "")
        _are_set(store, [_connected(rank) for rank in range(world.size)], _CONNECTED_S)
        return store
    if "MASTER_ADDR" in os.environ:
        _wait_until_known(os.environ["MASTER_ADDR"], "MASTER_ADDR")
        return _loopback_store(world)
    if world.size == 1:
        return HashStore()
    if world.launcher == "srun":
        return _slurm_store(world)
    if world.nodes > 1:
        raise WorldError(
            f"{world.launcher} gave the ranks on {world.nodes} machines no address to meet at: set MASTER_ADDR, rank "
            "0's machine, and MASTER_PORT in all processes. With mpirun: -x MASTER_ADDR=... -x MASTER_PORT=29500"
        )
    return local_store(world)


def local_store(world: World, name: str = "") -> Store:
    """Return a store of the ranks of this machine, which share only a launcher.

    Rank 0 makes the file in which they meet, and writes where it is into a file of this user's folder. It keeps that
    one locked until all have connected, and removes it then: a file without a lock is left of a killed world.
    The next world removes it.

    Args:
        world: this process among the others.
        name: that no other world of this user has; by default it follows from the launcher's process.

    Raises:
        WorldError: not all ranks have connected after half an hour.
    """
    try:
        folder = own_folder()
    except OSError as error:
        raise WorldError(f"{error.filename}: {error.strerror}: name a folder of your own in TMPDIR") from error
    return _local_store(world, folder / f"{_MEETINGS}{name or local_world_id()}")


def _local_store(world: World, path: Path) -> Store:
    others = {rank: _connected(rank) for rank in range(1, world.size)}
    if not world.is_first:
        store = Meeting(AnonymousFile.at(_read_path(world, path))).store()
        store.set(_connected(world.rank), "")
        _are_set(store, [*others.values()], _CONNECTED_S)
        return store
    for left in path.parent.glob(f"{_MEETINGS}*"):
        _remove_unlocked(left)
    meeting = AnonymousFile()
    store = Meeting(meeting).store()
    with _locked(path) as file:
        try:
            file.truncate(0)
            file.write(json.dumps({"path": meeting.path, "by": process_identity()}).encode())
            _wait_for_connections(world, store, others)
        finally:
            path.unlink(missing_ok=True)
    return store


def _locked(path: Path) -> io.FileIO:
    """Return the file `path`, created if missing, locked by this process until it is closed."""
    while True:
        file = open(path, "ab", buffering=0, opener=_opener)  # noqa: SIM115 - Path.open takes no opener
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # removed while this process waited for the lock


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _remove_unlocked(path: Path) -> None:
    """Remove a file that no process has locked."""
    with suppress(OSError), path.open("rb") as file:  # locked, removed meanwhile, or none of ours
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink:
            path.unlink()


def _wait_for_connections(world: World, store: Store, others: Mapping[int, str]) -> None:
    """Wait until the ranks of `others` have set their keys; print a line if that takes long."""
    if _are_set(store, [*others.values()], min(_SILENT_S, _CONNECTED_S)):
        return
    _say_waits(world, f"{_missing(store, others)}, not connected yet")
    if not _are_set(store, [*others.values()], max(_CONNECTED_S - _SILENT_S, 0.001)):
        raise WorldError(
            f"rank 0 of {world.size} waited {_CONNECTED_S:.0f} s for {_missing(store, others)}: see their output"
        )


def _connected(rank: int) -> str:
    return f"connected/{rank}"


def _are_set(store: Store, keys: list[str], timeout_s: float) -> bool:
    """Whether all of `keys` are set within `timeout_s`."""
    # Not `store.wait`: no signal interrupts a wait inside torch.
    until = time.monotonic() + timeout_s
    while not store.check(keys):
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_S)
    return True


def _missing(store: Store, others: Mapping[int, str]) -> str:
    ranks = [str(rank) for rank, key in others.items() if not store.check([key])]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"


def _read_path(world: World, path: Path) -> str:
    """Return the path written by rank 0 into `path`, once it exists; report a long wait."""
    began, said = time.monotonic(), False
    while (waited_s := time.monotonic() - began) < _CONNECTED_S:
        with suppress(FileNotFoundError, ValueError), open_own(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                # Rank 0 has it, or a process that is about to empty or remove what a killed world has left.
                if (text := file.read()) and not has_ended((meeting := json.loads(text))["by"]):
                    return str(meeting["path"])
        if not said and waited_s > _SILENT_S:
            said = True
            _say_waits(world, f"rank 0, which has not written yet into {path} where the ranks meet")
        time.sleep(0.01)
    raise WorldError(f"rank 0 did not write its address into {path} within {_CONNECTED_S:.0f} s; see its output")


def _say_waits(world: World, what: str) -> None:
    left_s = max(_CONNECTED_S - _SILENT_S, 0.0)
    print(f"rank {world.rank} of {world.size} waits for {what}; for {left_s:.0f} s more", file=sys.stderr, flush=True)


def _loopback_store(world: World) -> Store | None:
    """Return the store at a loopback MASTER_ADDR; None elsewhere, or if an agent serves it."""
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
    """Return the store of a Slurm step, under a prefix of this step and requeue."""
    host, port, name = slurm.meeting_point(os.environ)
    if world.nodes == 1:
        return local_store(world, name.replace("/", "-"))
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
                until = time.monotonic() + _KNOWN_S  # from now on: the first lookup can have taken seconds
            elif time.monotonic() > until:
                way_out = "make that name resolve on every machine, or give all processes an address in MASTER_ADDR"
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
        way_out = "end the program that listens there, or give all processes another MASTER_PORT"
        raise WorldError(f"rank 0 cannot listen at port {port}: {os.strerror(error.errno or 0)}; {way_out}") from error


def serve_store(port: int = 0, host: str = ADDRESS) -> TCPStore:
    """Return a store served by this process on `host` and `port`.

    The defaults are the loopback and a free port.

    By default, torch would listen on every interface of the machine.
    """
    listener = socket.create_server((host, port), backlog=1024)
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


_KEY, _OPENED = "values", "opened"
_POLL_S = 0.01
#: seconds after which a rank that sets a value is frozen, or was killed
_WRITTEN_S = 5.0
_DECODER = json.JSONDecoder()
#: seconds in which a value must be set by another rank
_WAITED = timedelta(minutes=5)


class SharedValues:
    """Methods of a `torch.distributed.Store` that the engine uses.

    One thread at a time uses an instance.

    Args:
        file: that holds the values.
    """

    #: of rank 0: files that some rank may not have opened yet, the store that counts the ranks that have, and how many
    #: will. Rank 0 does not wait for a rank that may have ended, and can be done with a file before all have opened it.
    _offered: ClassVar[list[tuple[AnonymousFile, Store, int]]] = []

    def __init__(self, file: AnonymousFile) -> None:
        self._file = file

    @classmethod
    def of_ranks(cls, store: Store, rank: int, size: int) -> "SharedValues":
        """Return new values shared by the ranks, `size` in number.

        Every rank calls this with the same unused private `store`.

        Raises:
            WorldError: rank 0 has ended.
        """
        if rank > 0:
            values = cls(AnonymousFile.at(store.get(_KEY).decode()))
            store.add(_OPENED, 1)
            return values
        cls._offered[:] = [(file, at, others) for file, at, others in cls._offered if at.add(_OPENED, 0) < others]
        values = cls(AnonymousFile())
        cls._offered.append((values._file, store, size - 1))
        store.set(_KEY, values._file.path)
        return values

    def clone(self) -> "SharedValues":
        """Return another instance with the same values, for another thread."""
        return SharedValues(AnonymousFile.at(self._file.path))

    def set(self, key: str, value: str) -> None:
        """Set the value of `key`.

        Raises:
            DistStoreError: another rank is frozen while it sets one.
        """
        with self._locked():
            data = json.dumps({**self._read(), key: value}).encode()
            os.pwrite(self._file.handle, data, 0)
            os.ftruncate(self._file.handle, len(data))

    def get(self, key: str) -> bytes:
        """Return the value of `key`, once it is set.

        Raises:
            DistStoreError: it was not set within five minutes.
        """
        self.wait([key])
        return str(self._read()[key]).encode()

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of `keys` are set."""
        return self._read().keys() >= {*keys}

    def wait(self, keys: Sequence[str], timeout: timedelta = _WAITED) -> None:
        """Wait until all of `keys` are set.

        Raises:
            DistStoreError: they were not, within `timeout`.
        """
        until = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > until:
                raise dist.DistStoreError(f"not set within {timeout.total_seconds():g} s: {', '.join(keys)}")
            time.sleep(_POLL_S)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        until = time.monotonic() + _WRITTEN_S
        while not self._try_lock():
            if time.monotonic() > until:
                raise dist.DistStoreError(f"another rank has been setting a value for {_WRITTEN_S:g} s: it is frozen")
            time.sleep(_POLL_S / 10)
        try:
            yield
        finally:
            fcntl.flock(self._file.handle, fcntl.LOCK_UN)

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._file.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _read(self) -> dict[str, Any]:
        """Return all values without a lock, which a frozen rank would hold.

        Values are read again while one is set.
        """
        until = time.monotonic() + _WRITTEN_S
        while True:
            data = os.pread(self._file.handle, os.fstat(self._file.handle).st_size, 0)
            try:
                found: dict[str, Any] = _DECODER.raw_decode(data.decode() or "{}")[0]
                return found
            except ValueError as error:
                if time.monotonic() > until:
                    raise dist.DistStoreError("a rank was killed while it set a value") from error
                time.sleep(_POLL_S / 10)
