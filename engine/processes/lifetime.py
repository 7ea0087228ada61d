"""Processes that do not outlive the one that started them, and how to find those that did.

Three mechanisms end all processes of a world, even if one of them is killed by SIGKILL:

- a child asks the kernel for a signal when its parent dies;
- a supervisor becomes the parent of orphaned descendants;
- every process of a world has the session of the world in its environment, and can be found by it.

Linux has all three. Elsewhere only the process group is left.
"""

import ctypes
import itertools
import os
import select
import signal
import sys
import threading
from pathlib import Path

__all__ = [
    "PARENT",
    "SESSION",
    "become_subreaper",
    "children",
    "descendants",
    "die_with",
    "die_with_parent",
    "exit_with",
    "exit_with_ancestors",
    "is_suspended",
    "parent_of",
    "processes_with_env",
    "signal_all",
    "tie_to_parent",
]

#: environment variable by which the processes of a world are found: the folder of its session
SESSION = "MIDSTRIDE_SESSION"
#: environment variable in which a parent gives its children its process id
PARENT = "MIDSTRIDE_PARENT"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LINUX = sys.platform == "linux"
#: opened here: between a fork and an exec there is no time for it
_LIBC = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _LINUX and _LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) was refused")


def die_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send the signal `by` to this process when its parent dies.

    Exit now if it is dead already.

    Args:
        parent: the process that started this one. The kernel does not report a parent that died before this call; then
            this process has another parent by now, and exits.
        by: the signal. The request survives `exec`, not `fork`.
    """
    _prctl(_PR_SET_PDEATHSIG, by)
    if _LINUX and os.getppid() != parent:
        os._exit(1)


def die_with(process: int) -> None:
    """End this process when `process` ends: its parent, or one that had a fork server start it."""
    if os.getppid() == process:
        die_with_parent(process)
    else:
        exit_with(process)


def tie_to_parent() -> None:
    """End with the parent named by `PARENT`, if set. Children of this process do not inherit it."""
    if parent := os.environ.pop(PARENT, None):
        die_with_parent(int(parent))


def exit_with(*processes: int) -> None:
    """End this process when one of `processes` ends, be it its parent or not."""
    if not _LINUX:
        return
    try:
        handles = [os.pidfd_open(process) for process in processes]
    except ProcessLookupError:
        os._exit(1)

    def wait() -> None:
        select.select(handles, [], [])
        os._exit(1)

    threading.Thread(target=wait, name="end-with", daemon=True).start()


def exit_with_ancestors(variable: str) -> None:
    """End this process when one of its ancestors ends.

    For launchers with processes of their own between them and the ranks: the kernel signals only the children of a
    process that dies.

    Args:
        variable: the ancestors that count have the same value of it in their environment as this process. If its
            parent has another (this process was started over a network), its two nearest ancestors count.
    """
    if not _LINUX:
        return
    above = _ancestors(os.getpid())
    ours = set(processes_with_env(variable, os.environ.get(variable, "")))
    exit_with(*(itertools.takewhile(ours.__contains__, above) if above[0] in ours else above[:2]))


def become_subreaper() -> None:
    """Become the parent of every descendant whose own parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _processes() -> list[Path]:
    return [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()] if _LINUX else []


def _parent_and_state(entry: Path) -> tuple[int, str] | None:
    try:
        text = (entry / "stat").read_text(errors="replace")
    except OSError:  # it ended while we looked
        return None
    state, parent = text.rpartition(")")[2].split()[:2]  # a name may hold spaces and brackets
    return int(parent), state


def children(parent: int) -> list[int]:
    """Return the living processes that `parent` started itself, or adopted."""
    found = ((int(entry.name), _parent_and_state(entry)) for entry in _processes())
    return [pid for pid, stat in found if stat is not None and stat[0] == parent and stat[1] not in "ZX"]


def descendants(ancestor: int) -> list[int]:
    """Return the living processes below `ancestor`, children before grandchildren."""
    children: dict[int, list[int]] = {}
    dead: set[int] = set()
    for entry in _processes():
        if (found := _parent_and_state(entry)) is not None:
            children.setdefault(found[0], []).append(int(entry.name))
            if found[1] in "ZX":
                dead.add(int(entry.name))
    below: list[int] = []
    queue = [ancestor]
    while queue:
        new = children.get(queue.pop(0), [])
        below += new
        queue += new
    return [pid for pid in below if pid not in dead]


def parent_of(process: int) -> int:
    """Return the parent of `process`; 0 if it has ended, or cannot be looked at."""
    found = _parent_and_state(Path(f"/proc/{process}"))
    return 0 if found is None else found[0]


def is_suspended(process: int) -> bool:
    """Whether `process` is stopped, by SIGSTOP or a debugger, until it is continued."""
    found = _parent_and_state(Path(f"/proc/{process}"))
    return found is not None and found[1] in "Tt"


def _ancestors(process: int) -> list[int]:
    """Return the ancestors of `process`, its parent first, without process 1."""
    above: list[int] = []
    while (found := _parent_and_state(Path(f"/proc/{process}"))) is not None and found[0] > 1:
        process = found[0]
        above.append(process)
    return above


def processes_with_env(variable: str, value: str) -> list[int]:
    """Return the living processes besides this one that were started with `variable`=`value`."""
    mark = f"{variable}={value}".encode()
    found = []
    for entry in _processes():
        try:
            environment = (entry / "environ").read_bytes()  # empty for a dead process
        except OSError:
            continue
        if mark in environment.split(b"\0") and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def signal_all(pids: list[int], by: signal.Signals = signal.SIGKILL) -> None:
    """Send the signal `by` to every process of `pids` that still runs."""
    for pid in pids:
        try:
            os.kill(pid, by)
        except (ProcessLookupError, PermissionError):
            continue
