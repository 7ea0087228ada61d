"""The frames of a script: which one iterates over a loop, and how it leaves it."""

import contextlib
import dis
import gc
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

from torch import nn

from midstride.engine.code_origin import module_of

__all__ = ["collects_items", "left_by_break", "reads_loop", "script_frames"]

_OURS = (str(Path(__file__).parent) + os.sep, contextlib.__file__)
#: what leads from a generator to all else
_NOT_READ = (FunctionType, ModuleType, type, nn.Module)
#: objects in which an iterator of the loop is looked for
_MOST_OBJECTS = 1000
#: instructions by which `break` and `return` drop the iterator of a `for`
_DROPS = frozenset({"POP_TOP", "POP_ITER"})
#: instructions by which a comprehension keeps an item
_COLLECTS = frozenset({"LIST_APPEND", "SET_ADD", "MAP_ADD"})
#: functions that keep something of all items that they read
_COLLECTORS = frozenset({"dict", "frozenset", "list", "max", "min", "set", "sorted", "sum", "tuple"})


def script_frames() -> Iterator[FrameType]:
    """Yield the frames that called the loop, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_OURS):
            yield frame
        frame = frame.f_back


def collects_items(frame: FrameType) -> bool:
    """Return whether `frame` waits for an item in a comprehension, or in a call such as `sum`."""
    instructions = list(dis.get_instructions(frame.f_code))
    at = next((index for index, one in enumerate(instructions) if one.offset == frame.f_lasti), None)
    if at is None:
        return False
    if instructions[at].opname == "FOR_ITER":
        return _appends(instructions, at)
    line = inspect.getframeinfo(frame).positions
    names = {
        one.argval
        for one in instructions[:at]
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME") and one.positions and line and one.positions.lineno == line.lineno
    }
    is_call = instructions[at].opname.startswith("CALL")
    return is_call and "next" not in names and not _COLLECTORS.isdisjoint(names)


def _appends(instructions: list[dis.Instruction], at: int) -> bool:
    """Return whether the loop of the FOR_ITER at `at` appends its items, and no loop in it."""
    end, at = instructions[at].argval, at + 1
    while at < len(instructions) and instructions[at].offset < end:
        one = instructions[at]
        if one.opname == "FOR_ITER":
            while at + 1 < len(instructions) and instructions[at + 1].offset < one.argval:
                at += 1
        elif one.opname in _COLLECTS:
            return True
        at += 1
    return False


def reads_loop(generator: "GeneratorType[Any, Any, Any]") -> bool:
    """Return whether a generator is reading the loop, whose position is in snapshots."""
    queue: list[Any] = [generator]
    seen = {id(generator)}
    for one in queue:
        place = one.gi_code.co_filename if isinstance(one, GeneratorType) else module_of(type(one))
        if place.startswith((_OURS[0], "midstride.engine.loop.")):
            return True
        held = [] if isinstance(one, _NOT_READ) else gc.get_referents(one)  # also the iterators that its `for`s read
        new = [item for item in held if id(item) not in seen][: _MOST_OBJECTS - len(queue)]
        seen.update(map(id, new))
        queue += new
    return generator.gi_running


def left_by_break() -> bool:
    """Return whether `break` or `return` has left an iterator, not an exception.

    An exception drops the iterator where it was raised or after its frame has ended; `break` by an instruction.
    """
    frame = next(script_frames(), None)
    if frame is None:
        return False
    names = {one.offset: one.opname for one in dis.get_instructions(frame.f_code)}
    return names.get(frame.f_lasti) in _DROPS
