"""Crash of a rank in native code: its signal, the line that called, and Python's stack."""

import faulthandler
import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO

from midstride.engine.code_origin import is_user_file
from midstride.engine.session.outcome import Outcome
from midstride.engine.session.private_file import read_own

__all__ = ["CRASHES", "crash_file", "crash_message", "crashes_in", "note_crashes", "show_crashes"]

#: files of `note_crashes` in a folder, one for each rank
CRASHES = "crash-rank-*"

_FRAME = re.compile(r'^  File "(?P<path>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_FATAL = "Fatal Python error: "
#: what Python calls a signal -> its name
_SIGNALS = {
    "Segmentation fault": signal.SIGSEGV.name,
    "Aborted": signal.SIGABRT.name,
    "Bus error": signal.SIGBUS.name,
    "Floating point exception": signal.SIGFPE.name,
    "Floating-point exception": signal.SIGFPE.name,
    "Illegal instruction": signal.SIGILL.name,
}
_FRAMES = 6

_open: list[IO[bytes]] = []


def note_crashes(path: Path) -> None:
    """Write Python's stack to `path` if native code crashes this process.

    Its forks write nothing.

    torchrun has enabled `faulthandler` for standard error; only one file is possible.
    """
    if _is_handled():
        return
    _open.append(path.open("wb"))
    faulthandler.enable(_open[-1], all_threads=False)
    os.register_at_fork(after_in_child=faulthandler.disable)


def show_crashes() -> None:
    """Print Python's stack on standard error if native code crashes this process."""
    if sys.__stderr__ is not None and not faulthandler.is_enabled() and not _is_handled():
        with suppress(OSError, ValueError):  # closed
            faulthandler.enable(sys.__stderr__, all_threads=False)


def _is_handled() -> bool:
    """Return whether a library handles segmentation faults itself, as a Java VM does to live on."""
    if faulthandler.is_enabled():
        return False
    with suppress(OSError):  # no Linux
        caught = re.search(r"^SigCgt:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (signal.SIGSEGV - 1) & 1)
    return False


def crash_file(folder: Path, rank: int) -> Path:
    """Return the file in `folder` for the stack of `rank`."""
    return folder / f"crash-rank-{rank:05d}"


def crashes_in(folder: Path) -> list[Outcome]:
    """Return the outcomes of ranks that native code crashed, from their files in `folder`."""
    found = []
    for path in sorted(folder.glob(CRASHES)):
        rank = int(path.name.rpartition("-")[2])
        if message := crash_message(read_own(path).decode(errors="replace"), f"rank {rank}"):
            found.append(Outcome("died", message, rank=rank, time=path.stat().st_mtime))
    return found


def crash_message(text: str, who: str) -> str:
    r"""Return signal and place of a crash of `who`, from the text of `note_crashes`.

    Empty without a crash.

    >>> said = 'Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n'
    >>> message = crash_message(said + '  File "/a/net.py", line 5 in training_step\n', "rank 1")
    >>> message.splitlines()[0]
    'rank 1 crashed in native code, a segmentation fault (SIGSEGV), called by training_step, net.py:5'
    """
    if not text.startswith(_FATAL):
        return ""
    kind = text.removeprefix(_FATAL).partition("\n")[0]
    frames = list(_FRAME.finditer(text))
    user = next((frame for frame in frames if is_user_file(frame["path"])), None)
    where = f", called by {user['function']}, {Path(user['path']).name}:{user['line']}" if user else ""
    named = f" ({_SIGNALS[kind]})" if kind in _SIGNALS else ""
    article = "an" if kind[:1].lower() in "aeiou" else "a"
    word = "abort" if kind == "Aborted" else kind.lower()
    return "\n".join(
        [
            f"{who} crashed in native code, {article} {word}{named}{where}",
            "A library did that, not Python code: update or reinstall it. The calls, innermost first:",
            *(frame.group() for frame in frames[:_FRAMES]),
        ]
    )
