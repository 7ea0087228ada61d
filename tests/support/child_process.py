"""A function called in a process of its own, and the memory that it took."""

import ctypes
import os
import traceback
from collections.abc import Callable
from pathlib import Path


def in_child(act: Callable[[], None]) -> tuple[int, int]:
    """Return how a forked child ended that does `act`, and by how many bytes its memory grew."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            ctypes.CDLL(None).malloc_trim(0)  # what other tests freed must not be what this one fills
            before = _memory("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            act()
            os.write(writing, str(_memory("VmHWM") - before).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    status = os.waitpid(pid, 0)[1]
    with os.fdopen(reading) as answer:
        return os.waitstatus_to_exitcode(status), int(answer.read() or 0)


def _memory(name: str) -> int:
    """Return one of this process's figures of memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
