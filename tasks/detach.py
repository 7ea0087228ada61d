"""Makes a flow independent of its parent process and its output. Ctrl-C goes to the parent."""

import os
import select
import stat
import threading
from collections.abc import Sequence

__all__ = ["detach"]

_STREAMS = (1, 2)  # standard output and standard error


def detach() -> None:
    """Make this process independent of its parent, except for the parent's signals.

    It gets its own process group: Ctrl-C goes to every process of a terminal's group, and `midstride serve` passes
    it on as well; a second request to stop would end the run at once.

    Once the reader of its output has gone, output is dropped. Otherwise Prefect's console handler would end the
    process at the next line.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
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
