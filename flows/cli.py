"""The command line `midstride`: the engine's commands, and those that need Prefect."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any, NoReturn

from cyclopts import Parameter

from midstride.engine.cli import Accepted, JobFile, Overrides, app, load
from midstride.engine.cli import main as run_command_line
from midstride.engine.console import show_error
from midstride.engine.errors import EngineError, StopRequested
from midstride.engine.job import TrainingJob

__all__ = ["app", "main", "train"]

_SIGNALS_HEEDED = 2  # the first stops the world in peace, the second at once


@app.command
def train(
    job: JobFile,
    *,
    run: Annotated[str | None, Parameter(help="Name of the run, to resume it; the flow run's id if empty.")] = None,
    overrides: Overrides | None = None,
    accepted: Accepted | None = None,
) -> int:
    """Train as a Prefect flow, here and now; without a server configured, on an embedded one."""
    from midstride.flows.terminal import Screen, quiet, show_report

    loaded = load(job, overrides, accepted)
    if run is not None:
        loaded.run_url(run)  # its faults now, not after the server has started
    quiet()
    screen = Screen(bar=loaded.trainer.enable_progress_bar)
    result = _run_flow(loaded, run, screen)
    if not isinstance(result, BaseException):
        show_report(screen.console, result)
        return 0
    if isinstance(result, Exception):
        show_error(str(result) if isinstance(result, EngineError) else f"{type(result).__name__}: {result}")
    if screen.url:
        from midstride.engine.report import report_of

        show_report(screen.console, report_of(loaded, screen.url.rpartition("/")[2]))
    return _code(result)


def _run_flow(job: TrainingJob, run: str | None, screen: Any) -> Any:
    """Return the flow's report, or what ended it: an exception or a signal."""
    try:
        with _signals():
            with screen.busy("starting Prefect"):
                from midstride.flows.server import api
                from midstride.flows.train import train as flow
                from midstride.tasks.watch import shown_by
            with api(screen.busy), screen, shown_by(screen):
                return flow(job, run)
    except BaseException as error:
        if isinstance(error, (SystemExit, GeneratorExit)):
            raise
        return error


def _code(error: BaseException) -> int:
    if not isinstance(error, Exception):
        return StopRequested.exit_code
    return error.exit_code if isinstance(error, EngineError) else EngineError.exit_code


@contextmanager
def _signals() -> Iterator[None]:
    """Turn signals into KeyboardInterrupt, and no more of them than can do good.

    Inside a flow SIGTERM is Prefect's, which turns it into an exception too and then passes it on to this handler:
    by then it has done its work.
    """
    heeded = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal heeded
        heeded += 1
        if heeded <= _SIGNALS_HEEDED:
            raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # `launch` hears it while there is a world
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> NoReturn:
    """Run the command line."""
    run_command_line(app)
