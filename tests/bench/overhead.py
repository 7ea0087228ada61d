"""What the orchestration costs: `midstride train` beside `midstride fit` on the same job, with a server that is up.

make bench-overhead
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table
from support.flow_runs import tiny_job, wait_for

PORT = 4299


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextmanager
def server(folder: Path) -> Iterator[dict[str, str]]:
    """Run a Prefect server; yield the environment of its clients."""
    url = f"http://127.0.0.1:{PORT}/api"
    environment = {**os.environ, "PREFECT_HOME": str(folder / "prefect"), "PREFECT_API_URL": url}
    command = [sys.executable, "-m", "prefect", "server", "start", "--port", str(PORT), "--no-ui"]
    with (folder / "server.txt").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_for(lambda: _answers(url), "Prefect's server", 300)
        yield environment
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def seconds(command: str, folder: Path, run: str, steps: int, environment: dict[str, str]) -> float:
    """Train for `steps` with `command`; return how long that took from start to end."""
    arguments = [command, str(folder / "job.yaml"), "--run", run, "--set", f"trainer.max_steps={steps}"]
    began = time.perf_counter()
    program = [sys.executable, "-m", "midstride.flows", *arguments]
    subprocess.run(program, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    """Print seconds a run and microseconds a step, of both, and what lies between them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4000, help="more than in the short run, from which a step follows")
    arguments = parser.parse_args()
    short = 24
    taken: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as name, server(Path(name)) as environment:
        folder = Path(name) / "job"
        tiny_job(folder, processes=1)
        for number in range(arguments.rounds):
            for steps in (short, short + arguments.steps):
                for command in ("fit", "train")[:: -1 if number % 2 else 1]:
                    run = f"{command}-{steps}-{number}"
                    taken.setdefault((command, steps), []).append(seconds(command, folder, run, steps, environment))
    table = Table("", "fit", "train", "between them")
    table.title = f"median of {arguments.rounds}, one process, {os.cpu_count()} cores"
    runs = [statistics.median(taken[command, short]) for command in ("fit", "train")]
    long = [statistics.median(taken[command, short + arguments.steps]) for command in ("fit", "train")]
    each = [1e6 * (after - before) / arguments.steps for before, after in zip(runs, long, strict=True)]
    table.add_row(f"a run of {short} steps, s", *(f"{one:.1f}" for one in runs), f"{runs[1] - runs[0]:.1f}")
    table.add_row("a step more, us", *(f"{one:.0f}" for one in each), f"{each[1] - each[0]:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
