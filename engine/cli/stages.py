"""`midstride prepare | status | evaluate | test | predict | compare`: stages beside `fit`."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.markup import escape

from midstride.engine.cli.app import Accepted, JobFile, Overrides, RunName, load_undated
from midstride.engine.cli.output import AsJson, busy, print_json
from midstride.engine.cli.report_view import show_runs
from midstride.engine.cli.snapshots import runs_at
from midstride.engine.cli.stop_signals import stoppable
from midstride.engine.cli.table import show_table, table_console
from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import JobError, UserError
from midstride.engine.formatting import format_bytes, format_count, format_number, url_name
from midstride.engine.jobs.operations import run_operation
from midstride.engine.registry.comparison import PromotionDecision
from midstride.engine.registry.nightly import judge, module_errors, nightly_errors, promote_if_better
from midstride.engine.registry.registry import ModelRegistry
from midstride.engine.runs.curves import draw_runs
from midstride.engine.runs.forked_job import as_forked
from midstride.engine.runs.run import Run, check_there, run_at
from midstride.engine.runs.run_comparison import RunComparison, compare_runs
from midstride.engine.runs.summary import summary_of
from midstride.engine.storage.draft import draft_of
from midstride.engine.storage.urls import absolute_url

__all__ = ["compare", "evaluate", "predict", "prepare", "score", "status"]

#: suffixes of files with predictions
_TABLES = (".csv", ".npz", ".parquet")

RunUrl = Annotated[str, Parameter(help="A run: a folder or an fsspec URL.")]
RunOverrides = Annotated[
    list[str],
    Parameter(name="--set", help="Override a key of its job: data_args.folder=/data", metavar="KEY=VALUE", negative=()),
]
Weights = Annotated[
    str | None, Parameter(help="best, last, or a folder or URL of weights; by default the best, else the last.")
]
Step = Annotated[int | None, Parameter(help="Test the snapshot of this step, also while training continues.")]
Data = Annotated[
    str | None, Parameter(help="package.module:Class of other data; pass its arguments with --set data_args=...")
]
Predictions = Annotated[Path, Parameter(help="File to write: .csv, .npz or .parquet.")]
Compared = Annotated[str, Parameter(help="Runs: folders or URLs; with --run, the job.")]
Picture = Annotated[Path | None, Parameter(help="File for a picture of the curves, such as compared.png.")]
Promotes = Annotated[bool, Parameter(help="Make the run champion if it is better.", negative=())]


def prepare(
    job: JobFile, /, *, overrides: Overrides | None = None, accepted: Accepted | None = None, as_json: AsJson = False
) -> int:
    """Prepare the data of a job in its own process, and show folder, number and size."""
    loaded = load_undated(job, overrides, accepted)
    manifest = _operation("prepare", loaded, loaded.name, "preparing the data")
    if as_json:
        print_json(manifest)
    elif manifest["folder"] is None:
        print("prepared; the data module has no folder")
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
    this = as_forked(Run(load_undated(job, overrides, accepted), run))
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
    step: Step = None,
    overrides: Overrides | None = None,
    accepted: Accepted | None = None,
    as_json: AsJson = False,
) -> int:
    """Test the best weights of a run, or a snapshot, on the job's test data."""
    loaded = load_undated(job, overrides, accepted)
    this = as_forked(Run(loaded, run))
    with this.store.errors_explained("read"):
        check_there(this.store)
    what = f"the best weights of {run}" if step is None else f"the snapshot of step {step} of {run}"
    scores = _operation("evaluate", loaded, run, f"testing {what}", step=step)
    _show_scores(scores, as_json, loaded)
    return 0


def _show_scores(scores: dict[str, float], as_json: bool, job: TrainingJob) -> None:
    if as_json:
        print_json(scores)
    else:
        if job.script is not None:
            print(f"as {job.script} logged them when it saved these weights; midstride cannot test a script's weights")
        print(
            "\n".join(f"{name}  {format_number(value)}" for name, value in scores.items())
            or f"{job.module} has no test_step: define it, and test_dataloader in {job.data}"
        )


def score(
    run: RunUrl,
    /,
    *,
    weights: Weights = None,
    overrides: RunOverrides | None = None,
    as_json: AsJson = False,
) -> int:
    """Test the weights of a run on its job's test data or on others, in a separate process."""
    this = run_at(run, overrides or ())
    if this.job.script is not None and overrides:
        raise UserError(f"--set: {this.job.script} tests its weights itself, on data of its own. Leave --set out")
    scores = _operation("evaluate", this.job, this.name, f"testing {run}", weights=_place(weights))
    _show_scores(scores, as_json, this.job)
    return 0


def predict(
    run: RunUrl,
    /,
    *,
    output: Predictions,
    data: Data = None,
    weights: Weights = None,
    overrides: RunOverrides | None = None,
    as_json: AsJson = False,
) -> int:
    """Predict with the weights of a run, and write the outputs of predict_step to a file.

    Runs in a process of its own.
    """
    if output.suffix not in _TABLES:
        raise UserError(f"--output {output}: the suffix is not one of {', '.join(_TABLES)}")
    this = run_at(run, [*([] if data is None else [f"data={data}"]), *(overrides or ())])
    chosen = {"output": str(output.absolute()), "weights": _place(weights)}
    written = _operation("predict", this.job, this.name, f"predicting with {run}", **chosen)
    if as_json:
        print_json(written)
    else:
        print(f"{output}: {format_count(written['rows'], 'row')} of {', '.join(written['columns'])}")
    return 0


def _place(weights: str | None) -> str | None:
    return weights if weights in (None, "best", "last") else absolute_url(weights)


def compare(
    *what: Compared,
    run: RunName | None = None,
    promote: Promotes = False,
    picture: Picture = None,
    overrides: Overrides | None = None,
    accepted: Accepted | None = None,
    as_json: AsJson = False,
) -> int:
    """Show runs side by side; with --run, compare a run with its job's champion."""
    if run is None:
        return show_comparison(what, picture, as_json)
    if len(what) != 1:
        raise UserError(f"--run {run} is compared with the champion of one job: give its file, not {len(what)} places")
    loaded = load_undated(Path(what[0]), overrides, accepted)
    registry = ModelRegistry.of(loaded)
    decision = _challenge(what[0], Run(loaded, run), registry, promote)
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


def _challenge(where: str, run: Run, registry: ModelRegistry, promote: bool) -> PromotionDecision:
    """Compare `run` with the champion of its job, read from `where`; promote it if requested.

    Only a better run is promoted.
    """
    if faults := nightly_errors(run.job) or module_errors(run):
        raise JobError.of(where, faults)
    if (done := registry.promoted(run.name)) is not None and done.decision is not None:
        return done.decision
    tests = _operation("compare", run.job, run.name, f"testing {run.name} and the champion")
    return promote_if_better(run, tests, registry) if promote else judge(run.job, tests)


def _operation(name: str, job: TrainingJob, run: str, doing: str, **arguments: Any) -> Any:
    """Run an operation on a run; the process says nothing of its own unless it fails."""
    with stoppable(), busy(doing):
        return run_operation(name, Run(job, run), on_line=lambda _: None, arguments=arguments)


def show_comparison(urls: Sequence[str], picture: Path | None, as_json: bool) -> int:
    """Show the runs at `urls` side by side; draw their curves into the file `picture`."""
    with busy(f"reading {len(urls)} runs"), ExitStack() as reading:
        found = [one for url in urls for one in reading.enter_context(runs_at(url))]
        if len(found) < 2:
            raise UserError(f"{' '.join(urls) or 'nothing'}: two runs are needed. Name runs, or the store of all runs")
        names = [url_name(store.url) for _, store in found]
        clear = names if len(set(names)) == len(names) else [store.url for _, store in found]
        compared = compare_runs(dict(zip(clear, (store for _, store in found), strict=True)))
    if picture is not None:
        _draw(picture, compared)
    if as_json:
        print_json({name: value for name, value in asdict(compared).items() if name != "rows"})
        return 0
    console, columns = table_console(), ("", *compared.runs)
    for title, table in (("settings that differ", compared.settings), ("values", compared.values)):
        rows = [[escape(name), *map(_cell, values)] for name, values in table.items()]
        if rows:
            show_table(console, title, columns, rows, texts=("",))
        else:
            console.print(f"{title}: none")
    if picture is not None:
        print(f"curves  {picture}")
    return 0


def _cell(value: Any) -> str:
    if value is None:
        return ""
    is_float = isinstance(value, float)
    return format_number(value) if is_float else escape(str(value))


def _draw(path: Path, compared: RunComparison) -> None:
    drawn = draw_runs(dict(zip(compared.runs, compared.rows, strict=True)))
    if drawn is None:
        raise UserError(f"{path} has nothing to show: matplotlib is not installed, or the runs have logged nothing")
    try:
        with draft_of(path) as draft:
            draft.write_bytes(drawn)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}. Name another file") from error
