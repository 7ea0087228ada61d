"""Private names of torch's elastic agent; `tests/unit/test_internals.py` tests each."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

__all__ = ["end_ranks_within", "ranks_started_by"]

_API: Any = import_module("torch.distributed.elastic.multiprocessing.api")


@contextmanager
def ranks_started_by(start: Callable[[tuple[str, ...], dict[str, str]], Any]) -> Iterator[None]:
    """Make torch's agents start their ranks with `start` until the block ends.

    Args:
        start: takes the command of a rank and its environment. Returns the process, which leads a session and has the
            `pid`, `poll` and `wait` of a `subprocess.Popen`; or None, and the agent starts the command as usual.
    """

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            started = None if self._stdout or self._stderr else start(args, env)
            return super()._popen(args, env) if started is None else started

    before = _API.get_subprocess_handler
    _API.get_subprocess_handler = Handler
    try:
        yield
    finally:
        _API.get_subprocess_handler = before


def end_ranks_within(shutdown_s: float) -> None:
    """Set the seconds between SIGTERM and kill of ranks by the agents of this process."""
    seconds = max(1, round(shutdown_s))
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(seconds)
    _API.PContext.close.__defaults__ = (None, seconds)  # before 2.13 torch has neither that variable nor an option
