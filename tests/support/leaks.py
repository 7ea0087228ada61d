"""What a test leaves behind: environment variables, handlers of signals, threads, processes, a process group."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

#: enough on a busy machine
GRACE_S = 30.0
#: set by pytest for each test, and by torch (its compiler) and scikit-learn when they are first imported
ALLOWED_VARIABLES = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")
#: threads that live as long as the process and belong to no test, of libraries and of ours
LASTING_THREADS = ("fsspecIO", "pin_memory", "asyncio_", "AnyIO worker thread", "seaweed", "midstride signals")
#: signals whose handlers the next test, and what it forks, would have
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
#: processes that live as long as the tests and belong to none
LASTING_PROCESSES: set[int] = set()


class Surroundings:
    """What there was before a test.

    Args:
        token: a part of the environment of all that is started from here, `NAME=value`.
        grace_s: what threads and processes get to end after the test that started them.
    """

    def __init__(self, token: str, grace_s: float = GRACE_S) -> None:
        self._token, self._grace_s = token.encode(), grace_s
        self._environment, self._threads, self._processes = _environment(), _threads(), _processes()
        self._handlers = {number: signal.getsignal(number) for number in SIGNALS}

    def leaks(self) -> list[str]:
        """Return what there is now that was not there before, once it had time to end."""
        leaks = _differences(self._environment, _environment())
        for number, handler in self._handlers.items():
            if (found := signal.getsignal(number)) is not handler:
                signal.signal(number, handler)
                leaks.append(f"handler of {number.name} {found!r}, was {handler!r}")
        leaks += [f"thread {thread.name}" for thread in self._outlived()]
        leaks += [f"process {pid}: {_command(pid)}" for pid in self._surviving()]
        if (distributed := sys.modules.get("torch.distributed")) and distributed.is_initialized():
            distributed.destroy_process_group()
            leaks.append("the default process group")
        return leaks

    def _outlived(self) -> set[threading.Thread]:
        deadline = time.monotonic() + self._grace_s
        for thread in _threads() - self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return _threads() - self._threads

    def _surviving(self) -> list[int]:
        """Return what lives and comes from here, orphans included."""
        deadline = time.monotonic() + self._grace_s
        while (alive := self._started_since()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return alive

    def _started_since(self) -> list[int]:
        return [pid for pid in _processes() - self._processes - LASTING_PROCESSES if self._is_ours(pid)]

    def _is_ours(self, pid: int) -> bool:
        folder = Path(f"/proc/{pid}")
        try:
            # After the name, which may hold anything and stands in brackets: state, parent, process group.
            state, parent, group = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:3]
            if state in "ZX":
                return False
            if int(parent) == os.getpid():
                return True
            # Orphans of this process group: other programs in it (a second pytest) have their parent in it, too.
            if int(group) == os.getpgrp() != os.getpgid(int(parent)):
                return True
            return self._token in (folder / "environ").read_bytes()
        except OSError:
            return False  # it has ended meanwhile


def _processes() -> set[int]:
    """Return the ids of all there are: to look at those that a test has started is enough, and soon done."""
    with os.scandir("/proc") as entries:
        return {int(entry.name) for entry in entries if entry.name.isdigit()}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    except OSError:
        return "has ended meanwhile"


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ALLOWED_VARIABLES}


def _differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    changed = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    for name in changed:
        # Put it back, so that one leak is one failure.
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]
    return [f"environment variable {name}={after.get(name)!r}, was {before.get(name)!r}" for name in changed]


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.name.startswith(LASTING_THREADS)}
