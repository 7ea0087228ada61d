"""The frames of a script: which one iterates over a loop, and how it leaves it."""

import contextlib
import dis
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

__all__ = ["left_by_break", "script_frames"]

_OURS = (str(Path(__file__).parent) + os.sep, contextlib.__file__)
#: instructions by which `break` and `return` drop the iterator of a `for`
_DROPS = frozenset({"POP_TOP", "POP_ITER"})


def script_frames() -> Iterator[FrameType]:
    """Yield the frames that called the loop, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_OURS):
            yield frame
        frame = frame.f_back


def left_by_break() -> bool:
    """Return whether `break` or `return` has left an iterator, not an exception.

    An exception drops the iterator where it was raised or after its frame has ended; `break` by an instruction.
    """
    frame = next(script_frames(), None)
    if frame is None:
        return False
    names = {one.offset: one.opname for one in dis.get_instructions(frame.f_code)}
    return names.get(frame.f_lasti) in _DROPS
