"""Begin runs with another version of midstride, kill them in the middle of an epoch, and resume them with this one.

git worktree add ../earlier COMMIT && make -C ../earlier .venv/.installed
PYTHONPATH=tests .venv/bin/python -m soak.earlier ../earlier/.venv/bin/python
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from midstride.engine.fault_injection import FaultPlan
from midstride.engine.snapshots.weights_index import FOLDERS, newest_weights
from midstride.engine.storage.store import Store

__all__ = ["main"]

MODULE = Path(__file__).with_name("earlier_module.py")
JOB = """
name: earlier
module: earlier_module:Classifier
data: earlier_module:Points
seed: 7
world: {strategy: ddp, processes: 2}
trainer: {max_epochs: 3}
snapshots: {url: runs, every_steps: 5}
monitor: {metric: val/loss, mode: min}
"""


def script(strategy: str) -> Callable[[str, str], list[str]]:
    """Return what trains a run by a plain script."""
    return lambda python, run: [python, "earlier_module.py", strategy, f"runs/{run}"]


def torchrun(python: str, run: str) -> list[str]:
    """Return what trains a run under torchrun."""
    return [python, "-m", "midstride.engine", "fit", "job.yaml", "--run", run]


def flow(python: str, run: str) -> list[str]:
    """Return what trains a run as a Prefect flow, on a server of its own."""
    return [str(Path(python).with_name("midstride")), "train", "job.yaml", "--run", run]


#: how a run is trained -> its command, what happens in the middle of an epoch, and to which rank. A flow would resume a
#: run whose rank is killed: where a rank hangs, what started the run is killed
STARTS: dict[str, tuple[Callable[[str, str], list[str]], Literal["kill", "hang"], int]] = {
    "single": (script("single"), "kill", 0),
    "ddp_fork": (script("ddp_fork"), "kill", 1),
    "torchrun": (torchrun, "kill", 1),
    "flow": (flow, "hang", 0),
}
#: steps that are done then: an epoch has 24, or 12 on two ranks
KILLED_AFTER = 17


def train(folder: Path, command: list[str], plan: FaultPlan | None = None) -> int:
    """Return how the command ended."""
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PREFECT_HOME": str(folder / ".prefect")}
    environment = {**os.environ, **fixed, **(plan.environment if plan else {})}
    environment.pop("PYTHONPATH", None)  # that of the other version is its own
    process = subprocess.Popen(command, cwd=folder, env=environment)
    while process.poll() is None:
        if plan and plan.faults[0].kind == "hang" and plan.fired():
            process.kill()
        time.sleep(0.1)
    return process.returncode


def bits(url: Path) -> dict[str, bytes]:
    """Return what must not depend on what happened to the run."""
    store = Store.open(str(url))
    saved = {name: weights for name in FOLDERS if (weights := newest_weights(store, name))}
    assert {"best", "last"} <= {*saved}, f"{url} has only {sorted(saved)}"
    return {"metrics.csv": store.read("metrics.csv")} | {
        name: store.read(f"{name}/{weights.file}") for name, weights in saved.items()
    }


def main() -> None:
    """Try every way in which ranks are started."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", help="of an environment that holds the other version")
    parser.add_argument("--only", choices=STARTS, help="one way to start; all of them by default")
    arguments = parser.parse_args()
    other = str(Path(arguments.python).absolute())  # not resolved: that would leave its environment
    for name, (command, fault, rank) in STARTS.items():
        if arguments.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory(prefix="earlier-") as path:
            folder = Path(path)
            (folder / MODULE.name).write_text(MODULE.read_text())
            (folder / "job.yaml").write_text(JOB)
            (folder / "plan").mkdir()
            plan = FaultPlan(folder / "plan").add(fault, rank=rank, step=KILLED_AFTER, phase="backward")
            assert train(folder, command(other, "killed"), plan) != 0, f"{name}: the kill did not end the run"
            plan.assert_all_fired()
            for python, run in ((other, "undisturbed"), (sys.executable, "killed")):
                assert train(folder, command(python, run)) == 0, f"{name}: {run} failed"
            undisturbed, resumed = bits(folder / "runs" / "undisturbed"), bits(folder / "runs" / "killed")
        if differing := [part for part, data in undisturbed.items() if resumed[part] != data]:
            sys.exit(f"{name}: begun by {other}, resumed by {sys.executable}: other bits in {', '.join(differing)}")
        print(f"{name}: {', '.join(undisturbed)} are equal", flush=True)


if __name__ == "__main__":
    main()
