"""Kill a run again and again, at random but repeatable points, and compare what it comes to with a run left in peace.

make soak
make soak ARGS="--kills 200 --seed 3"
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

from midstride.engine.config.job import TrainingJob
from midstride.engine.fault_injection import PHASES, FaultPlan
from midstride.engine.launch.launch import launch
from midstride.engine.runs.run import Run
from midstride.engine.snapshots.catalog import WEIGHTS
from midstride.engine.snapshots.weights import newest_weights
from midstride.engine.storage.store import Store

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "digits"
EPOCHS, STEPS_PER_EPOCH = 6, 38


def random_kills(folder: Path, *, seed: int, kills: int, ranks: int, steps: int) -> FaultPlan:
    """Return a plan of `kills` kills of any rank, in any phase, anywhere in a run of `steps` steps; none twice."""
    draw = random.Random(seed)
    plan = FaultPlan(folder)
    points = [(step, phase, rank) for step in range(steps - 1) for phase in PHASES for rank in range(ranks)]
    for step, phase, rank in sorted(draw.sample(points, kills)):
        plan.add("kill", rank=rank, step=step, phase=phase)
    return plan


def outcome_of(job: TrainingJob, run: str) -> dict[str, bytes]:
    """Return the bits that must not depend on what happened to a run."""
    store = Store.open(job.run_url(run))
    saved = {folder: newest_weights(store, folder) for folder in WEIGHTS}
    weights = {folder: store.read(f"{one.path}/model.safetensors") for folder, one in saved.items() if one}
    return {**weights, "metrics.csv": store.read("metrics.csv")}


def live_through(job: TrainingJob, run: str, plan: FaultPlan) -> int:
    """Launch the run until it is done; return how many attempts it took."""
    attempts = 0
    before = len(plan.fired())
    while True:
        attempts += 1
        outcome = launch(Run(job, run))
        fired = plan.fired()
        print(f"attempt {attempts}: {outcome.kind}, {len(fired)} of {len(plan.faults)} kills so far", flush=True)
        if outcome.kind == "done":
            return attempts
        if len(fired) == before:
            raise SystemExit(f"this attempt ended without being killed: {outcome.error}")
        before = len(fired)


def main() -> None:
    """Soak the digits example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        shutil.copytree(EXAMPLE, Path(folder, "digits"), ignore=shutil.ignore_patterns("runs", "__pycache__"))
        job = TrainingJob.load(Path(folder, "digits", "job.yaml"), [f"trainer.max_epochs={EPOCHS}"])
        assert launch(Run(job, "calm")).kind == "done"
        plan_folder = Path(folder, "plan")
        steps = EPOCHS * STEPS_PER_EPOCH
        plan = random_kills(plan_folder, seed=arguments.seed, kills=arguments.kills, ranks=2, steps=steps)
        os.environ.update(plan.environment)
        attempts = live_through(job, "soaked", plan)
        plan.assert_all_fired()
        calm, soaked = outcome_of(job, "calm"), outcome_of(job, "soaked")
    if calm != soaked:
        sys.exit(f"seed {arguments.seed}: not the same bits: {sorted(calm)} and {sorted(soaked)}")
    print(f"{arguments.kills} kills in {attempts} attempts, seed {arguments.seed}: not a bit is other than undisturbed")


if __name__ == "__main__":
    main()
