"""How long it takes from the death of a rank to the first new step, and where the time goes.

make bench-restart
"""

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table
from support.flow_runs import tiny_job

from midstride.engine.config.job import TrainingJob
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.launch.job_fork_server import job_fork_server
from midstride.engine.launch.launch import launch
from midstride.engine.runs.run import Run
from midstride.engine.session.events import Event

#: what ends each part, in order
PARTS = {
    "detected": "the launcher knows and has cleaned up",
    "started": "supervisor, launcher and the process of rank 0",
    "imported": "torch, the user's module and data",
    "met": "the ranks have met",
    "resumed": "the snapshot is verified and loaded",
    "step": "the first new step",
}


@contextmanager
def heartbeat_seen(folder: Path, seen: list[float]) -> Iterator[None]:
    """Note when the first rank of the next world comes up: its heartbeat is the first thing it writes."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.005):
            if not seen and any(folder.glob("midstride-*/heartbeat-rank-00000")):
                seen.append(time.time())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def restart(job: TrainingJob, folder: Path) -> dict[str, float]:
    """Kill a rank of a new run; return the seconds of each part of the restart."""
    plan_folder = folder / "plan"
    plan = FaultPlan(plan_folder).add("kill", rank=job.world.processes - 1, step=20, phase="forward")
    os.environ.update(plan.environment)
    events: list[Event] = []
    launch(Run(job, "night"))
    times = {"detected": time.time()}
    killed = (plan_folder / "fired-000").stat().st_mtime
    seen: list[float] = []
    with heartbeat_seen(folder, seen):
        assert launch(Run(job, "night"), on_event=events.append).kind == "done"
    times["started"] = seen[0]
    for event in events:
        times.setdefault(event.kind, event.time)
    ends = [killed, *(times[part] for part in PARTS)]
    return {part: end - begin for part, begin, end in zip(PARTS, ends, ends[1:], strict=False)}


def main() -> None:
    """Print the parts, and their shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--launcher", default="torchrun")
    arguments = parser.parse_args()
    rounds = []
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            job = tiny_job(folder)
            world = job.world.model_copy(update={"launcher": arguments.launcher})
            tempfile.tempdir = name  # where sessions are made
            launched = job.model_copy(update={"world": world})
            try:
                with job_fork_server(launched):
                    rounds.append(restart(launched, folder))
            finally:
                tempfile.tempdir = None
    medians = {part: statistics.median(one[part] for one in rounds) for part in PARTS}
    total = sum(medians.values())
    table = Table("until", "seconds", "share")
    table.title = f"{arguments.launcher}, 2 ranks, median of {arguments.rounds}, {os.cpu_count()} cores"
    for part, words in PARTS.items():
        table.add_row(words, f"{medians[part]:.2f}", f"{medians[part] / total:.0%}")
    table.add_row("in all", f"{total:.2f}", "")
    Console().print(table)


if __name__ == "__main__":
    main()
