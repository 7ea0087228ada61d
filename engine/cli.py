"""The command line of the engine: `python -m midstride.engine`, and the part of `midstride` that needs no Prefect.

A command ends with 0 done; 2 the job or the user's code is wrong; 75 stopped on request, the same command
resumes; 1 the rest.
"""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

from cyclopts import App, CycloptsError, Parameter

from midstride.engine.console import WorldView, show_error, show_outcome, show_snapshots
from midstride.engine.errors import EngineError, JobError, StopRequested, UserError
from midstride.engine.job import TrainingJob
from midstride.engine.snapshots.history import History
from midstride.engine.snapshots.store import Store

__all__ = ["Accepted", "JobFile", "Overrides", "RunName", "app", "load", "main", "stoppable"]

JobFile = Annotated[Path, Parameter(help="The job, a YAML file.")]
RunName = Annotated[str, Parameter(help="Name of the run; the same name again resumes it.")]
Overrides = Annotated[
    list[str], Parameter(name="--set", help="A choice set from outside: trainer.max_epochs=2", negative=())
]
Accepted = Annotated[
    list[str],
    Parameter(name="--accept-change", help="What may differ from the snapshot: seed, data_args, ...", negative=()),
]

app = App(name="midstride", help="PyTorch training that picks up in mid-stride, bit for bit.")
snapshots = App(name="snapshots", help="Look at the snapshots of a run, or of all runs of a store.")
app.command(snapshots)


@app.command
def fit(job: JobFile, *, run: RunName, overrides: Overrides | None = None, accepted: Accepted | None = None) -> int:
    """Train, in processes of its own, resuming the run if it has been started before."""
    from midstride.engine.launch import launch

    loaded = load(job, overrides, accepted)
    with stoppable(), WorldView(bar=loaded.trainer.enable_progress_bar) as view:
        outcome = launch(loaded, run, on_line=view.line, on_event=view.event)
    show_outcome(outcome)
    if outcome.kind == "done":
        print(f"run {run} is done: {loaded.run_url(run)}")
    return outcome.code


def load(job: Path, overrides: list[str] | None, accepted: list[str] | None) -> TrainingJob:
    """Return the job in a file, with what the command line says on top."""
    extra = [f"accept_change=[{', '.join(accepted)}]"] if accepted else []
    return TrainingJob.load(job, [*(overrides or ()), *extra])


@app.command
def check(job: JobFile, *, overrides: Overrides | None = None) -> int:
    """Find every fault of a job at once, without training."""
    from midstride.engine.check import faults_in

    if faults := faults_in(TrainingJob.load(job, overrides or ())):
        raise JobError.of(job, faults)
    print(f"{job} is in order")
    return 0


@snapshots.command(name="list")
def list_snapshots(url: str) -> int:
    """List the snapshots that count, and those that were set aside."""
    for name, history in _histories(url):
        show_snapshots(name, history)
    return 0


@snapshots.command
def verify(url: str) -> int:
    """Read every byte of every snapshot that counts and compare it with what was written."""
    good = [show_snapshots(name, history, verify=True) for name, history in _histories(url)]
    return 0 if all(good) else 1


@snapshots.command
def prune(url: str, *, keep: int = 3) -> int:
    """Remove older snapshots beyond the newest ones of each run.

    Args:
        url: a run, or a store of runs.
        keep: how many stay.
    """
    if keep < 1:
        raise JobError.of("prune", [f"--keep: at least 1 is needed, not {keep}: a run without a snapshot starts over"])
    for name, history in _histories(url):
        removed = history.prune(keep)
        print(f"{name}: {len(removed)} removed, {len(history.snapshots())} kept")
    return 0


def _histories(url: str) -> Iterator[tuple[str, History]]:
    """The runs at `url`: it is one, or a folder of them."""
    store = Store.open(url)
    if _is_run(store):
        yield url, History(store)
        return
    runs = [name for name in store.list() if _is_run(store.at(name))]
    if not runs:
        raise UserError(f"{url} is no run and holds none: name a run's folder or URL, or the store of all runs.")
    for name in runs:
        yield name, History(store.at(name))


def _is_run(store: Store) -> bool:
    return bool({"run.json", "lease", "snapshots"} & set(store.list()))


@contextmanager
def stoppable() -> Iterator[None]:
    """Turn the signals that ask a process to stop into `StopRequested`, raised in the main thread."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise StopRequested(f"asked to stop by {signal.Signals(number).name}; the same command resumes")

    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(commands: Callable[..., object] = app, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; errors end in one block on standard error, never in a traceback of ours."""
    tokens = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = commands(tokens, exit_on_error=False, result_action="return_value")
        sys.exit(code if isinstance(code, int) else 0)
    except CycloptsError:
        sys.exit(2)  # it has said what is wrong
    except EngineError as error:
        show_error(str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(StopRequested.exit_code)
