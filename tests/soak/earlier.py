"""Begin runs with another version of midstride, kill them in the middle of an epoch, and resume them with this one.

git worktree add ../earlier COMMIT && make -C ../earlier .venv/.installed
PYTHONPATH=tests .venv/bin/python -m soak.earlier ../earlier/.venv/bin/python
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

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


#: how a run is trained -> its command, and the rank that is killed
STARTS = {"single": (script("single"), 0), "ddp_fork": (script("ddp_fork"), 1), "torchrun": (torchrun, 1)}
#: steps that are done then: an epoch has 24, or 12 on two ranks
KILLED_AFTER = 17


def train(folder: Path, command: list[str], plan: FaultPlan | None = None) -> int:
    """Return how the command ended."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", **(plan.environment if plan else {})}
    environment.pop("PYTHONPATH", None)  # that of the other version is its own
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


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
    other = str(Path(parser.parse_args().python).absolute())  # not resolved: that would leave its environment
    for name, (command, rank) in STARTS.items():
        with tempfile.TemporaryDirectory(prefix="earlier-") as path:
            folder = Path(path)
            (folder / MODULE.name).write_text(MODULE.read_text())
            (folder / "job.yaml").write_text(JOB)
            (folder / "plan").mkdir()
            plan = FaultPlan(folder / "plan").add("kill", rank=rank, step=KILLED_AFTER, phase="backward")
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
