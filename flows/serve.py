"""Executes due runs in processes of this one. They receive its requests to stop."""

import asyncio
import os
import signal
from contextlib import suppress

from prefect.deployments.runner import RunnerDeployment
from prefect.runner import Runner

from midstride.engine.processes.lifetime import children, signal_all

__all__ = ["serve_until_asked", "start_command"]

_ASKED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_S = 0.1


def serve_until_asked(deployment: RunnerDeployment) -> None:
    """Register `deployment` and run its due runs until Ctrl-C, SIGTERM or SIGHUP.

    Active runs are then asked to stop, each takes a last snapshot, and Retry resumes them. Prefect's own `serve` kills
    them on Ctrl-C, and on SIGTERM waits for their end. A second request has no further effect.
    """
    runner = Runner()
    runner.add_deployment(deployment)
    name = f"{deployment.flow_name}/{deployment.name}"
    print(f"serving: {name}, until Ctrl-C\n  run it:  {start_command(name)}", flush=True)
    asyncio.run(_serve(runner))


def start_command(name: str) -> str:
    """Return the command that starts a run of the deployment `name` ("train/nightly")."""
    return f"prefect deployment run {name}{' --param run=NAME' if name.startswith('evaluate/') else ''}"


async def _serve(runner: Runner) -> None:
    asked, told = asyncio.Event(), set[int]()
    # An ignored signal stays ignored, as under nohup.
    heeded = [number for number in _ASKED_BY if signal.getsignal(number) != signal.SIG_IGN]

    running, waiting = asyncio.create_task(runner.start()), asyncio.create_task(asked.wait())
    await asyncio.sleep(0)  # by then it has its own handler of SIGTERM, which ours replaces
    for number in heeded:
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    while runs := {*children(os.getpid())}:
        signal_all([*(runs - told)], signal.SIGTERM)
        told |= runs
        await asyncio.sleep(_LOOK_S)
    if runner.started:
        await runner.astop()
    else:
        running.cancel()
    with suppress(asyncio.CancelledError):
        await running
