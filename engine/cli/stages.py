"""`midstride prepare | status | evaluate | compare`: stages of a training beside `fit`, for people and schedulers."""

import time
from dataclasses import asdict
from typing import Annotated, Any

from cyclopts import Parameter

from midstride.engine.cli.app import Accepted, JobFile, Overrides, RunName, load_undated
from midstride.engine.cli.output import AsJson, busy, print_json
from midstride.engine.cli.report_view import show_runs
from midstride.engine.cli.stop_signals import stoppable
from midstride.engine.cli.table import table_console
from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import JobError
from midstride.engine.formatting import format_bytes, format_count, format_number
from midstride.engine.jobs.operations import run_operation
from midstride.engine.registry.comparison import compare as compare_tests
from midstride.engine.registry.nightly import metric_of, nightly_errors
from midstride.engine.registry.registry import ModelRegistry
from midstride.engine.runs.run import Run
from midstride.engine.runs.summary import summary_of

__all__ = ["compare", "evaluate", "prepare", "status"]

Promotes = Annotated[bool, Parameter(help="Make the run champion if it is better.", negative=())]


def prepare(
    job: JobFile, /, *, overrides: Overrides | None = None, accepted: Accepted | None = None, as_json: AsJson = False
) -> int:
    """Prepare the data of a job, in a process of its own, and show their folder, number and size."""
    loaded = load_undated(job, overrides, accepted)
    manifest = _operation("prepare", loaded, loaded.name, "preparing the data")
    if as_json:
        print_json(manifest)
    elif manifest["folder"] is None:
        print("prepared; the data module keeps no folder")
    else:
        print(f"{manifest['folder']}: {format_count(manifest['files'], 'file')}, {format_bytes(manifest['bytes'])}")
    return 0


def status(
    job: JobFile,
    /,
    *,
    run: RunName,
    overrides: Overrides | None = None,
    accepted: Accepted | None = None,
    as_json: AsJson = False,
) -> int:
    """Show how far a run of a job is, or how it ended."""
    this = Run(load_undated(job, overrides, accepted), run)
    with busy(f"looking at {this.url}"), this.store.errors_explained("read"):
        summary = summary_of(run, this.store)
    if as_json:
        print_json({**asdict(summary), "url": this.url})
    else:
        show_runs(table_console(), this.job.store_url, [summary], time.time())
    return 0


def evaluate(
    job: JobFile,
    /,
    *,
    run: RunName,
    overrides: Overrides | None = None,
    accepted: Accepted | None = None,
    as_json: AsJson = False,
) -> int:
    """Test the best weights of a run on the job's test data, in a process of its own."""
    loaded = load_undated(job, overrides, accepted)
    scores = _operation("evaluate", loaded, run, f"testing the best weights of {run}")
    if as_json:
        print_json(scores)
    else:
        print("\n".join(f"{name}  {format_number(value)}" for name, value in scores.items()) or "there is no test_step")
    return 0


def compare(
    job: JobFile,
    /,
    *,
    run: RunName,
    promote: Promotes = False,
    overrides: Overrides | None = None,
    accepted: Accepted | None = None,
    as_json: AsJson = False,
) -> int:
    """Compare a run with the champion of its job, on the same test data; with --promote, promote it if it is better."""
    loaded = load_undated(job, overrides, accepted)
    if faults := nightly_errors(loaded):
        raise JobError.of(job, faults)
    assert loaded.monitor is not None  # one of the faults
    registry = ModelRegistry.of(loaded)
    if (done := registry.promoted(run)) is not None and done.decision is not None:
        decision = done.decision
    else:
        tests = _operation("compare", loaded, run, f"testing {run} and the champion")
        decision = compare_tests(
            tests["challenger"],
            tests["champion"],
            metric=metric_of(loaded),
            mode=loaded.monitor.mode,
            margin=loaded.nightly.margin,
            over=tests["over"],
        )
        if promote and decision.promoted:
            registry.promote(Run(loaded, run), tests["weights"], decision)
    if as_json:
        champion = registry.current()
        print_json(
            {
                **decision.model_dump(),
                "run": run,
                "champion_run": champion and champion.run,
                "champion_weights": champion and registry.weights_url(champion),
            }
        )
    else:
        print(f"{run} {'is better' if decision.promoted else 'is not better'}: {decision.why}")
    return 0


def _operation(name: str, job: TrainingJob, run: str, doing: str) -> Any:
    """Run an operation on a run; the process says nothing of its own unless it fails."""
    with stoppable(), busy(doing):
        return run_operation(name, Run(job, run), on_line=lambda _: None)
