"""Ends a script that does not catch an engine's error with the command line's exit code."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from midstride.engine.errors import EngineError, StopRequested, Superseded
from midstride.engine.processes.forked_program import end_process
from midstride.engine.world import World

__all__ = ["exit_codes_of_errors"]

#: the code of a process that Ctrl-C has ended, as shells give it
INTERRUPTED = 128 + signal.SIGINT


@contextmanager
def exit_codes_of_errors() -> Iterator[None]:
    """End this process with the `exit_code` of an uncaught error of the block.

    Notebooks show errors themselves.
    """
    try:
        yield
    except (EngineError, KeyboardInterrupt):
        _set_hook()  # now: torch sets a hook of its own with a process group, which would swallow what ours says
        raise


def _set_hook() -> None:
    before = sys.excepthook
    if getattr(before, "__module__", None) == __name__:
        return

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, (StopRequested, Superseded, KeyboardInterrupt)):
            before(kind, error, trace)
        elif World.from_environment().is_first:
            print(f"midstride: {str(error) or 'interrupted'}", file=sys.stderr, flush=True)
        if isinstance(error, (EngineError, KeyboardInterrupt)):
            code = error.exit_code if isinstance(error, EngineError) else INTERRUPTED
            if not sys.flags.inspect:
                end_process(code)
            raise SystemExit(code)  # under `python -i`, which continues

    sys.excepthook = uncaught
