"""Sets the command line and variables of a fork in `/proc`, instead of its ancestor's.

Linux reads both from the memory of the process, where they are overwritten. Elsewhere nothing is done.
"""

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["show_command", "show_variable"]

_LINUX = sys.platform == "linux"
_PROC = Path("/proc/self")


def show_command(command: Sequence[str]) -> None:
    """Make `/proc` and `ps` show `command` for this process, as far as there is room."""
    if _LINUX:
        start, end = _bounds(48)
        text = b"".join(part.encode() + b"\0" for part in command)[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def show_variable(name: str, value: str) -> None:
    """Make `/proc` show `value` as the variable `name` of this process.

    Args:
        name: of a variable that the ancestor was started with.
        value: no longer than the ancestor's value.

    Raises:
        ValueError: there was none, or it is longer.
    """
    if _LINUX:
        start, _ = _bounds(50)
        variables = _PROC.joinpath("environ").read_bytes().split(b"\0")
        found = next((one for one in variables if one.startswith(f"{name}=".encode())), None)
        if found is None or len(found) < len(text := f"{name}={value}".encode()):
            raise ValueError(f"{name}={value} does not fit over {found!r}")
        offset = sum(len(one) + 1 for one in variables[: variables.index(found)])
        ctypes.memmove(start + offset, text.ljust(len(found), b"\0"), len(found))


def _bounds(field: int) -> tuple[int, int]:
    """Return two neighbouring fields of `/proc/self/stat`, counted from 1: a start and an end."""
    fields = (_PROC / "stat").read_text().rpartition(")")[2].split()  # a name may hold spaces; the next is field 3
    return int(fields[field - 3]), int(fields[field - 2])
