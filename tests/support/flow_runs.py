"""A tiny job for tests of flows, what must be alike after its runs, and the command line as a process."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.limit import LIMIT_S

from midstride.engine.config.job import TrainingJob
from midstride.engine.snapshots.catalog import WEIGHTS
from midstride.engine.snapshots.weights import newest_weights
from midstride.engine.storage.store import Store

TINY = Path(__file__).parents[1] / "flows" / "tiny"
#: between two looks, and so many times what a look takes: who asks a server without a pause keeps two processes busy
POLL_S, _POLL_FACTOR, _LONGEST_POLL_S = 0.1, 20, 1.0
STEPS = 24  # 96 samples in batches of 4 on two ranks, twice


def tiny_job(
    folder: Path,
    *,
    processes: int = 2,
    launcher: str = "",
    steps: int = STEPS,
    retries_without_progress: int = 3,
    **module_args: Any,
) -> TrainingJob:
    """Return the tiny job, its code and its runs in `folder`."""
    shutil.copytree(TINY, folder, dirs_exist_ok=True)
    arguments = {"mark": "./mark", **module_args}
    world = {"strategy": "ddp" if processes > 1 else "single", "processes": processes, "launcher": launcher or None}
    (folder / "job.yaml").write_text(
        f"""
name: tiny
module: model:Net
module_args: {arguments}
data: model:Data
data_args: {{folder: ./data}}
seed: 3
world: {json.dumps(world)}
trainer: {{max_steps: {steps}, enable_progress_bar: false}}
snapshots: {{url: runs, every_steps: 5}}
monitor: {{metric: val/accuracy, mode: max}}
retries_without_progress: {retries_without_progress}
"""
    )
    return TrainingJob.load(folder / "job.yaml")


def results(job: TrainingJob, run: str) -> dict[str, bytes]:
    """Return the bits that must not depend on what happened to a run."""
    store = Store.open(job.run_url(run))
    saved = {folder: newest_weights(store, folder) for folder in WEIGHTS}
    weights = {folder: store.read(f"{one.path}/model.safetensors") for folder, one in saved.items() if one}
    assert weights, f"{store.url} holds no weights"
    return {**weights, "metrics.csv": store.read("metrics.csv")}


def train_forked(job: TrainingJob, run: str) -> None:
    """Train `job` to its end in forked ranks, which takes a second: who launches a life changes no bit of it."""
    from midstride.engine.testing import run_ranks

    assert run_ranks(_train, job, run, processes=job.world.processes) == [0] * job.world.processes


def _train(job: TrainingJob, run: str) -> None:
    from midstride.engine.config.import_paths import make_importable
    from midstride.engine.seeds import seed_everything

    if job.script:
        from midstride.engine.jobs.script import run_script
        from midstride.engine.loop.script_job import ScriptJob

        script = ScriptJob(job, job.run_url(run))
        run_script(script)
        script.close()
        return
    make_importable(job.folder)
    seed_everything(job.seed)
    from midstride.engine.jobs.build import build_data, build_module, build_trainer

    module, data = build_module(job), build_data(job)
    build_trainer(job).fit(module, data, run=job.run_url(run))


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = LIMIT_S) -> Any:
    """Return what `condition` gives as soon as it is true."""
    until = time.monotonic() + timeout_s
    while not (found := _look(condition)):
        assert time.monotonic() < until, f"waited {timeout_s:.0f} s for {what}"
    return found


def _look(condition: Callable[[], Any]) -> Any:
    """Return what `condition` gives, after a pause if it is not true."""
    began = time.monotonic()
    if not (found := condition()):
        time.sleep(min(max(POLL_S, _POLL_FACTOR * (time.monotonic() - began)), _LONGEST_POLL_S))
    return found


def wait_for_effect(act: Callable[[], None], condition: Callable[[], Any], what: str, each_s: float = 10.0) -> Any:
    """Act, and act again each `each_s` seconds until `condition` gives something; return it.

    A server on SQLite may miss an event, or take note of a new automation late: "database is locked" is all it says.
    """

    def tried() -> Any:
        act()
        until = time.monotonic() + each_s
        while not (found := _look(condition)) and time.monotonic() < until:
            pass
        return found

    return wait_for(tried, what)


#: as `python -m midstride.flows`, and it leaves the names of what it has loaded by its end in a file
_PROGRAM = """
import atexit, pathlib, sys
atexit.register(lambda: pathlib.Path({loaded!r}).write_text("\\n".join(sys.modules)))
from midstride.flows.cli import main
main()
"""


class Command:
    """`midstride ...` in a process of its own, as a person would run it."""

    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path) -> None:
        self.log, self._loaded = log, log.with_suffix(".loaded")
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM.format(loaded=str(self._loaded)), *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self.log.read_text()

    @property
    def loaded(self) -> set[str]:
        """The modules that it had loaded by its end."""
        return {*self._loaded.read_text().split()}

    def code(self, timeout_s: float = LIMIT_S) -> int:
        """Wait for its end and return its exit code."""
        return self.process.wait(timeout_s)
