"""Records where user code calls functions whose results differ each time, such as clocks."""

import os
import random
import sys
import time
from types import FrameType, TracebackType
from typing import Any

from midstride.engine.code_origin import is_python_file, is_user_file

__all__ = ["NondeterminismTracer"]

_CALLS: dict[Any, str] = {
    **{getattr(time, name): f"time.{name}()" for name in ("time", "time_ns", "perf_counter", "perf_counter_ns")},
    **{getattr(time, name): f"time.{name}()" for name in ("monotonic", "monotonic_ns", "process_time", "localtime")},
    os.urandom: "os.urandom()",
    os.getpid: "os.getpid()",
    id: "id()",
}
_METHODS = {"datetime.now": "datetime.now()", "datetime.utcnow": "datetime.utcnow()", "date.today": "date.today()"}


class NondeterminismTracer:
    """Records nondeterministic calls of user code in this thread, a line of `calls` per place.

    It slows an attempt down many times (`sys.setprofile`), so it is used only after a comparison has failed.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __enter__(self) -> "NondeterminismTracer":
        sys.setprofile(self._profile)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call" or (name := _nondeterministic(function)) is None:
            return
        caller: FrameType | None = frame
        while caller is not None and is_python_file(caller.f_code.co_filename):
            caller = caller.f_back
        if caller is None or not is_user_file(caller.f_code.co_filename):
            return
        if function is id and caller is not frame:  # by copy.deepcopy and json, whose results do not depend on it
            return
        code = caller.f_code
        line = f"{name} in {code.co_qualname} ({code.co_filename.rpartition('/')[2]}:{caller.f_lineno})"
        if line not in self.calls:
            self.calls.append(line)


def _nondeterministic(function: Any) -> str | None:
    """Return how a message calls `function`, if its results differ each time; else None."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, random.Random):
        own = owner is not random._inst
        return "a random.Random of its own" if own and function.__name__ in ("random", "getrandbits") else None
    try:
        return _CALLS.get(function) or _METHODS.get(getattr(function, "__qualname__", ""))
    except TypeError:  # a method of an unhashable object
        return None
