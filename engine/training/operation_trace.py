"""Trace of torch's operations: digests of arguments and result, and the calling line."""

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from midstride.engine.modules.torch_internals import TorchDispatchMode
from midstride.engine.state.tensor_digest import tensor_digest
from midstride.engine.trees import named_leaves

__all__ = ["OperationTrace"]

#: their results are memory that nothing has written yet
_UNWRITTEN = ("empty", "new_empty", "_empty", "resize_", "set_")
#: they overwrite their first argument without reading it
_OVERWRITING = ("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "copy_", "fill_", "zero_")
_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


class OperationTrace(TorchDispatchMode):
    """Notes each operation of this process while it is switched on."""

    def __init__(self) -> None:
        initialize: Any = super().__init__  # which has no types
        initialize()
        self._switched_on = ExitStack()
        #: name, digest of the arguments, digest of the result, file and line
        self.calls: list[tuple[str, str, str, str]] = []

    def begin(self) -> None:
        """Switch the trace on."""
        self._switched_on.enter_context(self)

    def end(self) -> list[tuple[str, str, str, str]]:
        """Switch the trace off; return the calls."""
        self._switched_on.close()
        return self.calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation, and note it."""
        name = str(func.overloadpacket.__name__)
        given = args[1:] if name in _OVERWRITING else args
        before = _digest((given, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if not name.startswith(_UNWRITTEN):
            self.calls.append((name, before, _digest(result), _line()))
        return result


def _digest(values: Any) -> str:
    def texts() -> Iterable[str]:
        for _, leaf in named_leaves(values):
            if isinstance(leaf, Tensor):
                yield tensor_digest(leaf)
            elif isinstance(leaf, (bool, int, float, str)):
                yield repr(leaf)

    return " ".join(texts())


def _line() -> str:
    """Return file and line of the innermost frame that is not torch's or ours."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if not frame.f_code.co_filename.startswith((*_OURS, "<")):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if frame.f_code.co_name == "backward":
            return "the backward pass"
        if frame.f_code.co_name == "step_without_closure":
            return "the optimizer's step"
        frame = frame.f_back
    return "the backward pass"
