"""The command line `midstride`: the engine's commands, and those that need Prefect."""

import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import datetime
from importlib import import_module
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, NoReturn

from cyclopts import Parameter

from midstride.engine.cli.app import Accepted, Date, JobFile, Overrides, TakesOver, app, load, load_undated
from midstride.engine.cli.app import main as run_command_line
from midstride.engine.cli.champions import listeners
from midstride.engine.cli.output import busy, show_error
from midstride.engine.cli.stop_signals import stop_signals
from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import EngineError, JobError, SnapshotError, StopRequested
from midstride.engine.formatting import url_name
from midstride.engine.launch.job_fork_server import job_fork_server
from midstride.engine.processes.preload import collector_paused
from midstride.engine.registry.nightly import date_errors, nightly_errors
from midstride.engine.registry.registry import Champion, ModelRegistry
from midstride.engine.runs.run import Run

__all__ = ["app", "deploy", "main", "nightly", "serve", "setup_server", "train"]

Name = Annotated[str, Parameter(help="Name of the deployment; repeat it to replace the deployment.")]
Flow = Annotated[Literal["train", "nightly", "evaluate"], Parameter(help="Flow to deploy.")]
Schedule = Annotated[
    str | None,
    Parameter(name="--cron", help="Schedule, such as '0 2 * * *'; without it, the flow runs only on request."),
]
TimeZone = Annotated[str | None, Parameter(name="--timezone", help="Time zone of --cron; UTC if empty.")]

_EMIT_TIMEOUT_S = 10.0
_SIGNALS_HEEDED = 2  # the first stops the world in peace, the second at once
#: seconds after the second in which Prefect's server can hear of it
_LEFT_S = 10.0


@app.command
def train(
    job: JobFile,
    /,
    *,
    run: Annotated[
        str | None, Parameter(help="Name of the run, to resume it; the flow run's id if empty.", metavar="NAME")
    ] = None,
    take_over: TakesOver = False,
    overrides: Overrides | None = None,
    accepted: Accepted | None = None,
) -> int:
    """Train as a Prefect flow, here and now; without a server configured, on an embedded one."""
    from midstride.engine.cli.report_view import show_report
    from midstride.flows.terminal import FlowView, quiet_prefect

    loaded = load_undated(job, overrides, accepted)
    if run is not None:
        loaded.run_url(run)  # its faults now, not after the server has started
    quiet_prefect()
    view = FlowView(bar=loaded.trainer.enable_progress_bar)
    result = _run_flow("train", loaded, (loaded, run, take_over), view)
    if not isinstance(result, BaseException):
        show_report(view.console, result)
        return 0
    return _failed(loaded, view, result, again="--run {run}")


@app.command
def nightly(
    job: JobFile,
    *,
    date: Date = None,
    if_new_data: Annotated[
        bool, Parameter(help="Train only on data that differ from those of the last night.", negative=())
    ] = False,
    overrides: Overrides | None = None,
    accepted: Accepted | None = None,
) -> int:
    """Train on the data of a date now. A better result replaces the champion."""
    from midstride.flows.terminal import FlowView, quiet_prefect, show_nightly_report

    loaded = load(job, overrides, accepted)
    date = date or datetime.now().strftime("%Y-%m-%d")
    if faults := nightly_errors(loaded, date):
        raise JobError.of(job, faults)
    quiet_prefect()
    view = FlowView(bar=loaded.trainer.enable_progress_bar)
    result = _run_flow("nightly", loaded, (loaded, date, if_new_data), view)
    if not isinstance(result, BaseException):
        show_nightly_report(view.console, result)
        return 0
    return _failed(loaded, view, result, again=f"--date {date}")


def _failed(job: TrainingJob, view: Any, result: BaseException, again: str) -> int:
    """Show the cause, progress and resume command of a failed flow. Return the exit code."""
    if isinstance(result, Exception):
        show_error(str(result) if isinstance(result, EngineError) else f"{type(result).__name__}: {result}")
    if view.url:
        from midstride.engine.cli.report_view import show_report
        from midstride.engine.runs.run_report import report_of

        run = url_name(view.url)
        with suppress(OSError, SnapshotError):  # the credentials went with the flow, or the store has gone
            show_report(view.console, report_of(Run(job, run)), again.format(run=run))
    elif not isinstance(result, Exception):
        print("stopped before training began: the same command starts it", file=sys.stderr)
    return _code(result)


@app.command
def deploy(
    job: JobFile,
    *,
    name: Name,
    pool: Annotated[str, Parameter(help="Work pool whose workers run the flow.")],
    flow: Flow = "train",
    cron: Schedule = None,
    timezone: TimeZone = None,
    overrides: Overrides | None = None,
    variables: Annotated[
        list[str] | None, Parameter(name="--variable", help="Set a job variable of the pool: image=...", negative=())
    ] = None,
) -> int:
    """Deploy a job to a Prefect server, for workers of a pool, with an optional schedule."""
    from midstride.flows.terminal import quiet_prefect

    loaded = _load_portable(job, overrides, flow)
    quiet_prefect()
    with busy("asking Prefect's server"):
        from midstride.flows.deployment import deploy as to_server
        from midstride.flows.serve import start_command

        address = to_server(loaded, name, pool=pool, flow=flow, cron=cron, timezone=timezone, variables=variables or ())
    started = start_command(f"{flow}/{name}")
    print(f"deployed: {flow}/{name}\n  see it:  {address}\n  run it:  {started}")
    return 0


@app.command
def serve(
    job: JobFile,
    *,
    name: Name,
    flow: Flow = "train",
    cron: Schedule = None,
    timezone: TimeZone = None,
    overrides: Overrides | None = None,
) -> int:
    """Deploy a job and run it on this machine when due, until Ctrl-C, without pool or worker."""
    loaded = _load_portable(job, overrides, flow)
    from midstride.flows.deployment import serve as until_stopped

    until_stopped(loaded, name, flow=flow, cron=cron, timezone=timezone)
    return 0


@app.command
def setup_server(
    *, pool: Annotated[str | None, Parameter(help="Name of a process work pool to create if missing.")] = None
) -> int:
    """Add automations for unattended runs to a self-hosted Prefect server. It can be repeated."""
    with busy("asking Prefect's server"):
        from midstride.flows.server import need_server
        from midstride.flows.server_setup import create_pool, ensure_automations

        need_server()
        done = ensure_automations()
    print("\n".join(done))
    if pool is not None:
        print(create_pool(pool))
    return 0


def _load_portable(job: Path, overrides: list[str] | None, flow: str) -> TrainingJob:
    """Load a job that has to hold in other folders and processes than this."""
    from midstride.engine.jobs.portability import portability_errors

    loaded = load(job, overrides, None)
    with busy("importing its code as a deployment would"):
        faults = portability_errors(loaded, nightly=flow == "nightly")
    if flow != "nightly":
        faults += date_errors(loaded)
    if faults:
        raise JobError.of(job, faults)
    return loaded


def _run_flow(name: str, job: TrainingJob, arguments: tuple[Any, ...], view: Any) -> Any:
    """Return the report of the flow called `name`, or the exception or signal that ended it."""
    try:
        # In a flow SIGTERM is Prefect's, which turns it into an exception too, and then passes it on to this handler.
        with stop_signals(_interrupted(), most=_SIGNALS_HEEDED), ExitStack() as stack:
            with suppress(EngineError):  # the flow will raise it, where Prefect's server hears of it
                stack.enter_context(job_fork_server(job))  # torch is imported while Prefect is
            with view.busy("starting Prefect"), collector_paused():
                from midstride.flows.server import api
                from midstride.tasks.prefect_internals import heartbeats_not_awaited

                flow = getattr(import_module(f"midstride.flows.{name}"), name)
                from midstride.tasks.monitor import view_for
                from midstride.tasks.server_outage import ServerLost
            with api(view.busy), heartbeats_not_awaited(), view, view_for(view):
                try:
                    return flow(*arguments)
                except ServerLost as lost:
                    view.line(str(lost))
                    return lost.result
    except BaseException as error:
        if isinstance(error, (SystemExit, GeneratorExit)):
            raise
        return error


def _interrupted() -> Callable[[signal.Signals], KeyboardInterrupt]:
    """Return a maker of exceptions for signals; the second signal ends this process soon.

    Its ranks end with it. While its server is away, Prefect would ask it for minutes.
    """
    presses = count(1)

    def interrupt(_: signal.Signals) -> KeyboardInterrupt:
        if next(presses) == _SIGNALS_HEEDED:
            signal.signal(signal.SIGALRM, _leave_now)
            signal.setitimer(signal.ITIMER_REAL, _LEFT_S)
        return KeyboardInterrupt()

    return interrupt


def _leave_now(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, b"Prefect's server was not told of the stop: it does not answer\n")
    os._exit(StopRequested.exit_code)


def _code(error: BaseException) -> int:
    if not isinstance(error, Exception):
        return StopRequested.exit_code
    return error.exit_code if isinstance(error, EngineError) else EngineError.exit_code


def _emit_rollback(registry: ModelRegistry, left: Champion, back: Champion) -> None:
    """Emit an event about `midstride champion rollback` if a server is configured.

    An error changes no champion.
    """
    from midstride.flows.terminal import quiet_prefect

    quiet_prefect()
    from prefect.events.worker import EventsWorker
    from prefect.settings import get_current_settings

    from midstride.flows.server import ServerError, need_server
    from midstride.tasks.events import ModelRolledBack, emit
    from midstride.tasks.resources import model

    if get_current_settings().api.url is None:
        return
    try:
        need_server()
    except ServerError as error:
        print(f"no event was sent to Prefect's server: {error}")
        return
    emit(ModelRolledBack(run=back.run, weights=registry.weights_url(back), after=left.run), model(registry.name))
    EventsWorker.drain_all(timeout=_EMIT_TIMEOUT_S)


def main() -> NoReturn:
    """Run the command line."""
    listeners.append(_emit_rollback)
    logging.raiseExceptions = False  # a server that is away is told of once, not with each batch of logs
    try:
        run_command_line(app)
    except SystemExit as ended:
        if "midstride.tasks.server_outage" in sys.modules and isinstance(ended.code, int):
            _leave_without_server(ended.code)
        raise


def _leave_without_server(code: int) -> None:
    """End at once with `code` if the server does not answer.

    Prefect would offer it logs and events for minutes.
    """
    from midstride.tasks.server_outage import is_without_server

    if is_without_server():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
