"""What a deployed flow prints goes through a pipe to its worker, and a worker may be killed."""

import os
import select
import stat
import threading
from collections.abc import Sequence

__all__ = ["outlive_readers"]

_STREAMS = (1, 2)  # standard output and standard error


def outlive_readers() -> None:
    """Let output go nowhere from the moment on at which nobody is left to read it; for the rest of this process.

    Prefect's console handler would end the process at the next line: days of training, for want of a terminal.
    """
    pipes = [number for number in _STREAMS if _is_pipe(number)]
    if pipes:
        threading.Thread(target=_watch, args=(pipes,), name="midstride outlet", daemon=True).start()


def _is_pipe(number: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(number).st_mode)
    except OSError:
        return False  # closed


def _watch(pipes: Sequence[int]) -> None:
    poll, open_ = select.poll(), set(pipes)
    for number in open_:
        poll.register(number, 0)  # for nothing but the kernel's word that the other end is gone
    nowhere = os.open(os.devnull, os.O_WRONLY)
    while open_:
        for number, _ in poll.poll():
            os.dup2(nowhere, number)
            poll.unregister(number)
            open_.discard(number)
    os.close(nowhere)
