"""What may befall a deployed run, and who takes it up again."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support.flow_runs import wait_for
from ui.site import TERMINAL, Run, Site

#: of a run: enough to linger until a test has done what it waits for
STEPS = 480

#: how long the server stays away: many of the flow's calls, and more than one of the worker's
_AWAY_S = 12.0


@dataclass(frozen=True)
class Death:
    """One row.

    Args:
        what: befalls a run under way.
        strike: does it.
        state: of the run when all that lived for it has ended.
        retry: how a retry is then asked for; None where it comes from the automation or the task.
    """

    what: str
    strike: Callable[[Site, Run], object]
    state: str = "Running"
    retry: Callable[[Site, Run], object] | None = None


def _kill_ranks(site: Site, run: Run) -> None:
    """Kill the one rank whenever it is on its way, until its flow gives up."""
    mark = Path(run.job.module_args["mark"])
    while run.state not in TERMINAL:
        # Ranks are forked, and no command line tells one.
        _kill(run, int(Path(f"{mark}-process").read_text()))
        mark.unlink()
        wait_for(lambda: mark.exists() or run.state in TERMINAL, "the rank, or the end", 300)


def _kill_flow(site: Site, run: Run) -> None:
    (found,) = run.processes(b"prefect.engine")
    _kill(run, found)


def _kill(run: Run, process: int) -> None:
    os.kill(process, signal.SIGKILL)
    wait_for(lambda: process not in run.processes(), f"process {process} to end")


def _kill_worker_and_flow(site: Site, run: Run) -> None:
    site.worker.end()
    _kill_flow(site, run)


def _stop_worker(site: Site, run: Run) -> None:
    site.worker.end(signal.SIGTERM)


def _take_server_away(site: Site, run: Run) -> None:
    site.server.end()
    time.sleep(_AWAY_S)
    site.server.start()


def _cancel(site: Site, run: Run) -> None:
    with site.browser() as screen:
        screen.show(run.id)
        screen.cancel()


def _by_command(site: Site, run: Run) -> None:
    site.command("prefect", "flow-run", "retry", run.id)


def _in_the_old_ui(site: Site, run: Run) -> None:
    with site.browser() as screen:
        screen.show(run.id, "v1")
        screen.retry("v1")


def _by_command_of_a_crash(site: Site, run: Run) -> None:
    """No process is left that could tell the server: the test does, and then makes the automation that will."""
    site.command("midstride.flows", "setup-server")  # not before: it would take a server that is away for a dead run
    run.set_crashed()
    _by_command(site, run)


def _by_command_to_new_services(site: Site, run: Run) -> None:
    _stop_worker(site, run)
    site.server.end(signal.SIGTERM)
    site.start()
    _by_command(site, run)


#: in this order they happen to one run; without a worker no process tells of the next death, so that one is last
DEATHS = [
    Death("the server is gone for a while", _take_server_away),
    Death("a rank is killed once too often", _kill_ranks, "Failed", _by_command_to_new_services),
    Death("the flow is killed", _kill_flow, "Crashed", _in_the_old_ui),
    Death("the run is cancelled in the UI", _cancel, "Cancelled", _by_command),
    Death("the worker is stopped", _stop_worker, "Running", _by_command_of_a_crash),
    # The automation finds out.
    Death("the worker and the flow are killed", _kill_worker_and_flow, "Crashed", _by_command),
    Death("the worker is killed", lambda site, run: site.worker.end()),
]
