"""A node, from its coming to its end: `midstride join HOST:PORT`. Needs no torch."""

import fcntl
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from midstride.engine.errors import JobError, WorldError
from midstride.engine.launch.log_lines import without_noise
from midstride.engine.launch.machines.channel import Channel, SecretRefused
from midstride.engine.launch.machines.secret import VARIABLE, read_secret
from midstride.engine.processes.supervised_process import SupervisedProcess
from midstride.engine.session.requests import GRACE_S
from midstride.engine.session.session import Session

__all__ = ["LAUNCHER_GONE", "join", "lock_folder"]

_POLL_S = 0.1
_PREFIX = "midstride-node-"
_PORTS = 65535
#: exit code of a node whose launcher has gone, or will try again
LAUNCHER_GONE = 69


def join(address: str, wait_s: float, secret_file: Path | None, on_line: Callable[[str], object]) -> int:
    """Train the run of the launcher at `address` on this machine; return the exit code.

    Over all its attempts.

    Args:
        address: HOST:PORT, as the job's `world.rendezvous`.
        wait_s: seconds to wait for the launcher, before the first attempt and between two.
        secret_file: with the run's secret; None if it is in the environment.
        on_line: called with the lines to print.

    Raises:
        JobError: a wrong argument, or the launcher has another secret.
        WorldError: no launcher has answered.
    """
    host, _, port = address.rpartition(":")
    faults = []
    if not host or not port.isdecimal() or int(port) > _PORTS:
        faults.append(f"ADDRESS: expected HOST:PORT, as in world.rendezvous of the job, not {address!r}")
    if not 0 <= wait_s < math.inf:
        faults.append(f"--wait: a number of seconds is needed, not {wait_s:g}")
    if faults:
        raise JobError.of("join", faults)
    secret = read_secret(secret_file)
    while True:
        _wait_for_launcher(address, wait_s, secret, on_line)
        code = _take_part(address, secret, on_line)
        if code != LAUNCHER_GONE:
            return code


def _take_part(address: str, secret: str, on_line: Callable[[str], object]) -> int:
    with _node_folder() as folder:
        command = [sys.executable, "-m", "midstride.engine.launch.machines.agent", address, folder]
        # When the launcher goes, its store is asked once more: that needs no C++ stacks in the log.
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
        environment = {**quiet, "PYTHONUNBUFFERED": "1", Session.VARIABLE: folder, VARIABLE: secret}
        log = Path(folder) / "log.txt"
        with SupervisedProcess(command, environment=environment, log=log, grace_s=GRACE_S) as group:
            code = None
            while code is None:
                code = group.poll()
                if lines := without_noise(group.lines()):
                    on_line("\n".join(lines))
                time.sleep(_POLL_S)
            return code


@contextmanager
def _node_folder() -> Iterator[str]:
    """Yield a folder that exists until the block ends; remove those of killed nodes first."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            _remove_unused(path)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as folder:
        lock = lock_folder(folder)
        try:
            yield folder
        finally:
            os.close(lock)


def lock_folder(folder: Path | str, kind: int = fcntl.LOCK_SH) -> int:
    """Lock the folder of a node while this process lives; return the lock's file descriptor."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)  # nothing else of another user
    fcntl.flock(descriptor, kind)
    return descriptor


def _remove_unused(folder: Path) -> None:
    """Remove the folder of a node if its processes have all ended.

    Raises:
        OSError: one of them lives, or the folder is another user's.
    """
    lock = lock_folder(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        if any(folder.iterdir()):  # one that is empty is about to be locked
            shutil.rmtree(folder)
    finally:
        os.close(lock)


def _wait_for_launcher(address: str, wait_s: float, secret: str, on_line: Callable[[str], object]) -> None:
    """Return once the launcher has proved that it knows the secret."""
    host, _, port = address.rpartition(":")
    until, told = time.monotonic() + wait_s, ""
    while True:
        try:
            Channel.connect(host, int(port), secret).close()
        except SecretRefused as error:
            raise SecretRefused(f"{error}: use the secret file that this launcher has printed") from error
        except OSError as error:
            why = str(error.strerror or error)
            if time.monotonic() > until:
                raise WorldError(
                    f"no launcher answers at {address} ({why}), for {wait_s:g} s: start midstride "
                    "fit or train there, with this address in world.rendezvous of the job"
                ) from error
            if why != told:
                on_line(f"no launcher answers at {address} yet ({why}): waiting for it, {wait_s:g} s at most")
                told = why
            time.sleep(0.5)
        else:
            return
