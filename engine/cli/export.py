"""`midstride export`: a run's metric log for a tracker, or its weights for other programs."""

import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from midstride.engine.cli.output import busy
from midstride.engine.cli.stop_signals import stoppable
from midstride.engine.config.job import TrainingJob
from midstride.engine.config.loggers import LOGGERS, LoggerOptions, checked_loggers
from midstride.engine.config.yaml_file import apply_overrides
from midstride.engine.errors import EngineError, JobError, UserError
from midstride.engine.formatting import url_name
from midstride.engine.jobs.operations import run_operation
from midstride.engine.loggers.build_logger import build_logger
from midstride.engine.loggers.delivery import Delivery, read_run_json
from midstride.engine.runs.run import check_there, job_of, run_at
from midstride.engine.snapshots.parent import open_run
from midstride.engine.snapshots.weights import folder_to_test
from midstride.engine.state.bounds import damaged_on_error
from midstride.engine.storage.store import Store

__all__ = ["export"]

_SUFFIXES = {"safetensors": ".safetensors", "pt2": ".pt2", "onnx": ".onnx", "hub": ""}

RunUrl = Annotated[str, Parameter(help="A run's folder or URL.")]
To = Annotated[
    str | None,
    Parameter(help="tensorboard, mlflow, wandb or package.module:Class; by default the run's loggers."),
]
Arguments = Annotated[
    list[str],
    Parameter(
        name="--set",
        help="Set an argument of the logger: log_dir=/tmp/tb; with --format, a key of the job: data_args.folder=/data",
        metavar="KEY=VALUE",
        negative=(),
    ),
]
Kind = Annotated[
    Literal["safetensors", "pt2", "onnx", "hub"] | None,
    Parameter(name="--format", help="Write the weights: as tensors, by torch.export, for ONNX, for from_pretrained."),
]
Output = Annotated[Path | None, Parameter(help="File to write with --format; a folder for hub.")]
Weights = Annotated[
    Literal["best", "last"] | None,
    Parameter(help="Which weights --format writes; by default the best, else the last."),
]


def export(
    url: RunUrl,
    /,
    *,
    kind: Kind = None,
    output: Output = None,
    weights: Weights = None,
    to: To = None,
    arguments: Arguments | None = None,
) -> int:
    """Send a run's missing rows and best weights to a tracker; or write weights with --format."""
    if kind is None:
        return _to_trackers(url, to, arguments or [])
    if to is not None:
        raise UserError(f"--to={to} sends to a tracker and --format={kind} writes a file: give one of them")
    run = run_at(url, arguments or [])
    with run.store.errors_explained("read"):
        folder = weights or folder_to_test(run.store)
    place = Path.cwd() / (output or Path(f"{url_name(url)}-{folder}{_SUFFIXES[kind]}"))
    with stoppable(), busy(f"exporting the {folder} weights of {url}"):
        chosen = {"kind": kind, "output": str(place), "weights": folder}
        print(run_operation("export", run, on_line=lambda _: None, arguments=chosen))
    return 0


def _to_trackers(url: str, to: str | None, arguments: list[str]) -> int:
    """Send a run's rows and best weights to the chosen trackers; return the exit code."""
    store, code = open_run(url), 0
    with store.errors_explained("read"):
        chosen, job = _loggers(store, to, arguments), job_of(store)
    for number, options in enumerate(chosen):
        key = f"loggers.{number}" if to is None else "--to"
        try:
            with busy(f"sending {url} to {options.path}"):
                step = _send(store, options.in_project(job.name) if job else options, key, _folder(job))
        except EngineError as error:
            print(error, file=sys.stderr)
            code = max(code, error.exit_code)
        except Exception as error:
            said = (str(error).splitlines() or ["no reason given"])[0]
            print(f"{options.path}: {type(error).__name__}: {said}. Call this again once it answers", file=sys.stderr)
            code = max(code, 1)
        else:
            print(f"{options.path} has the rows of {url} up to step {step}")
    return code


def _send(store: Store, options: LoggerOptions, key: str, folder: str) -> int:
    """Send missing rows to a logger's tracker; return the step up to which it has them."""
    with closing(Delivery(store, build_logger(options, key, folder))) as delivery:
        delivery.finish()
        return delivery.step


def _folder(job: TrainingJob | None) -> str:
    """Return the folder of a run's code: its job's, if it exists, else the current one."""
    return job.folder if job is not None and Path(job.folder).is_dir() else str(Path.cwd())


def _loggers(store: Store, to: str | None, arguments: list[str]) -> list[LoggerOptions]:
    """Return the requested loggers; those of the run itself have the run's arguments.

    Raises:
        UserError: there is no run at the URL, or none is named and the run has none.
        JobError: there is no such logger, or an argument cannot be read.
        SnapshotDamaged: the run's run.json has unexpected content.
    """
    check_there(store)
    if not store.exists("run.json"):
        raise UserError(f"{store.url} is no run: it has no run.json")
    with damaged_on_error(f"{store.url}/run.json"):
        own = [LoggerOptions.model_validate(one) for one in read_run_json(store).get("loggers", [])]
    chosen = own if to is None else [options for options in own if options.path == to]
    if to is not None and not chosen:
        found, faults = checked_loggers([to])
        chosen, faults = [*found], [fault.replace("loggers.0.path", "--to", 1) for fault in faults]
    elif not chosen:
        raise UserError(f"{store.url} has no loggers of its own: add --to {', --to '.join(LOGGERS)}")
    else:
        faults = []
    given: dict[str, Any] = {}
    faults += apply_overrides(given, arguments, example="log_dir=/tmp/tb")
    if faults:
        raise JobError.of("export", faults)
    return [options.model_copy(update={"args": {**options.args, **given}}) for options in chosen]
