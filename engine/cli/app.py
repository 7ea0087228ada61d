"""Command line of the engine: `python -m midstride.engine`, and commands without Prefect.

A command ends with 0 done; 2 the job or the user's code is wrong; 75 stopped on request, the same command
resumes; 1 the rest.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NoReturn

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter, UnusedCliTokensError

from midstride.engine.cli.champions import champion
from midstride.engine.cli.export import export
from midstride.engine.cli.output import (
    busy,
    reader_has_gone,
    say_stage,
    show_audit,
    show_error,
    show_outcome,
    surroundings_fault,
)
from midstride.engine.cli.project import init, schema
from midstride.engine.cli.report_view import show_report
from midstride.engine.cli.snapshots import Url, report, runs, runs_at, snapshots
from midstride.engine.cli.stop_signals import stoppable
from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import EngineError, JobError, SnapshotError, StopRequested
from midstride.engine.registry.nightly import date_errors, date_to_try, with_date
from midstride.engine.runs.forked_job import as_forked
from midstride.engine.runs.run import Run
from midstride.engine.session.crash import show_crashes
from midstride.engine.session.requests import GRACE_S
from midstride.engine.session.terminal_view import LastingOutput, TerminalView

__all__ = ["Accepted", "Date", "JobFile", "Overrides", "RunName", "TakesOver", "app", "load", "main"]

JobFile = Annotated[Path, Parameter(help="The job, a YAML file.")]
RunName = Annotated[str, Parameter(help="Name of the run; repeat it to resume.", metavar="NAME")]
Overrides = Annotated[
    list[str],
    Parameter(name="--set", help="Override a key of the job: trainer.max_epochs=2", metavar="KEY=VALUE", negative=()),
]
Date = Annotated[
    str | None, Parameter(help="Date of the data, for {date} in the job's arguments: 2026-03-01; today if empty.")
]
Accepted = Annotated[
    list[str],
    Parameter(
        name="--accept-change",
        help="Resume although this differs from the snapshot: seed, data_args, ...",
        metavar="KEY",
        negative=(),
    ),
]

TakesOver = Annotated[
    bool, Parameter(help="Take over the run from another process that is training it.", negative=(), name="--take-over")
]
Resumes = Annotated[
    bool,
    Parameter(help="Also interrupt and resume a few steps, on the CPU, and compare the bits.", negative=()),
]

Determinism = Annotated[
    bool, Parameter(help="Also execute two steps twice, and name operations that are not repeatable.", negative=())
]

app = App(name="midstride", help="PyTorch training that resumes in the middle of an epoch, bit for bit.")
for command in (snapshots, champion, runs, report, export, init, schema):
    app.command(command)
STAGES = {  # command -> function by name: their file imports this one
    "prepare": (
        "prepare",
        "Prepare the data of a job in a separate process; show their folder, number and size.",
    ),
    "status": ("status", "Show the progress or the end of a run of a job."),
    "evaluate": (
        "evaluate",
        "Test the best weights of a run, or a snapshot, on the job's test data, in a separate process.",
    ),
    "test": ("score", "Test the weights of a run on the test data of its job, or on others, in a separate process."),
    "predict": ("predict", "Predict with the weights of a run; write the outputs of predict_step into one file."),
    "compare": ("compare", "Show runs side by side; or, with --run, compare a run with the champion of its job."),
}
for name, (function, summary) in STAGES.items():
    app.command(f"midstride.engine.cli.stages:{function}", name=name, help=summary)
FORKS = {
    "fork": "Start a new run from a snapshot of another run; nothing is copied.",
    "verify": "Compute a run again between its kept snapshots, and compare the whole state.",
    "diff": "Name the first step at which two runs differ, and its cause.",
    "replay": "Compute a step of a run again, inspect it, and compare it with the run.",
}
for name, summary in FORKS.items():
    app.command(f"midstride.engine.cli.{name}:{name}", name=name, help=summary)
app.register_install_completion_command(help="Let the shell complete midstride's commands and options.")


@app.command
def fit(
    job: JobFile,
    /,
    *,
    run: RunName,
    take_over: TakesOver = False,
    overrides: Overrides | None = None,
    accepted: Accepted | None = None,
) -> int:
    """Train in separate processes; resume the run if it exists."""
    from midstride.engine.launch.job_fork_server import job_fork_server
    from midstride.engine.launch.launch import launch
    from midstride.engine.runs.report_files import write_report
    from midstride.engine.runs.trackers import tell_trackers

    loaded = load_undated(job, overrides, accepted)
    with stoppable():
        this, view = Run(loaded, run), TerminalView(bar=loaded.trainer.enable_progress_bar)
        with view, job_fork_server(loaded):
            view.begin(this.url)
            outcome = launch(this, on_line=view.line, on_event=view.event, take_over=take_over)
        show_outcome(outcome)
        if outcome.is_refusal:
            return outcome.code
        with suppress(OSError, SnapshotError):  # the store has gone; the outcome is printed already
            written, _ = write_report(this)
            if loaded.loggers:
                tell_trackers(this.store, written, loaded.folder)
            show_report(view.console, written, "" if outcome.kind == "done" else f"--run {run}")
    return outcome.code


@app.command
def rank(
    job: JobFile, /, *, run: RunName, overrides: Overrides | None = None, accepted: Accepted | None = None
) -> NoReturn:
    """Train as one rank of a process group started by torchrun, srun or mpirun.

    They may restart or resize the group.

    As in: torchrun --nnodes=1:4 --nproc-per-node=2 --max-restarts=3 --no-python -- midstride rank job.yaml --run first
    """
    from midstride.engine.launch.rank import train_as_rank
    from midstride.engine.processes.forked_program import end_process
    from midstride.engine.world import World

    world = World.from_environment()
    if world.launcher is None:
        raise JobError(
            "nothing has started this process as a rank: RANK and WORLD_SIZE, or Slurm's or MPI's variables, are not "
            f"set. Put torchrun, srun or mpirun before it, or let midstride start the ranks: midstride fit {job} --run "
            f"{run}"
        )
    end_process(train_as_rank(as_forked(Run(load_undated(job, overrides, accepted), run)), world).code)


@app.command
def join(
    address: Annotated[str, Parameter(help="HOST:PORT of the launcher: world.rendezvous of its job.")],
    /,
    *,
    secret_file: Annotated[
        Path | None, Parameter(help="File with the run's secret, as the launcher prints it; or set MIDSTRIDE_SECRET.")
    ] = None,
    wait: Annotated[float, Parameter(help="Seconds to wait for the launcher, at first and between attempts.")] = 300.0,
) -> int:
    """Join the run that `midstride fit` or `train` has started at an address.

    It ends with the run: 0 done, 2 the job or the code is wrong, 75 stopped. If this command alone is stopped, the
    others take a snapshot and train on without this machine; start it again to rejoin.
    """
    from midstride.engine.launch.machines.join import join as take_part

    with stoppable():
        output = LastingOutput()
        return take_part(address, wait, secret_file, lambda text: print(text, file=output, flush=True))


def load(job: Path, overrides: list[str] | None, accepted: list[str] | None) -> TrainingJob:
    """Return the job in a file with the overrides of the command line."""
    return TrainingJob.load(job, overrides or (), accepted or ())


def load_undated(job: Path, overrides: list[str] | None, accepted: list[str] | None) -> TrainingJob:
    """Return the job in a file as `load` does; one that needs the date of a night is refused."""
    loaded = load(job, overrides, accepted)
    if faults := date_errors(loaded):
        raise JobError.of(job, faults)
    return loaded


@app.command
def check(
    job: JobFile,
    /,
    *,
    resume: Resumes = False,
    determinism: Determinism = False,
    date: Date = None,
    overrides: Overrides | None = None,
) -> int:
    """Find all faults of a job: one step is tried, and one batch of validation and test.

    Nothing is kept.
    """
    loaded = TrainingJob.load(job, overrides or ())
    show_crashes()
    say_stage("importing torch and the code of the job")  # which takes seconds
    from midstride.engine.jobs.check import job_errors
    from midstride.engine.jobs.portability import portability_errors
    from midstride.engine.lanes import allowed_sizes
    from midstride.engine.launch.clusters.build import build_cluster
    from midstride.engine.launch.launchers.build import own_launcher_faults

    warnings: list[str] = []
    if faults := [*own_launcher_faults(loaded), *job_errors(loaded, date, say=say_stage, warn=warnings.append)]:
        raise JobError.of(job, faults)
    night = date_to_try(loaded, date)
    shown = _shown(job, loaded if night is None else with_date(loaded, night), resume, determinism)
    say_stage("importing its code as a deployment would")
    if elsewhere := portability_errors(loaded):
        warnings.append("\n  ".join(["in a deployment it would not be:", *elsewhere]))
    tried = f" as the night of {night}" if night is not None else ""
    print(f"{job} is in order{tried}{shown}")
    if loaded.world.launched_by == "join":
        print("\n".join(loaded.world.machines.sentences()))
    if (cluster := build_cluster(Run(loaded, "RUN"), GRACE_S)) is not None:
        print(f"it would request machines with: {cluster.describe(loaded.world.rendezvous or 'HOST:PORT')}")
    if (lanes := loaded.world.lanes) is not None:
        *some, most = allowed_sizes(lanes)
        print(f"{lanes} lanes: {', '.join(map(str, some))} or {most} processes end with the same bits")
    print("".join(f"{warning}\n" for warning in warnings), end="")
    return 0


def _shown(path: Path, job: TrainingJob, resume: bool, determinism: bool) -> str:
    """Return what trials of a few steps have shown, as the end of a sentence.

    Raises:
        JobError: a trial failed.
    """
    from midstride.engine.cli.replay import launch_quietly
    from midstride.engine.cli.resume_check import resume_errors
    from midstride.engine.runs.repeatability import unrepeatable

    shown = ""
    if resume:
        say_stage("interrupting a few steps, and resuming them")
        if faults := resume_errors(job):
            raise JobError.of(path, faults)
        shown += ", and resumes exactly"
    if determinism:
        say_stage("executing two steps twice")
        if found := unrepeatable(job, launch_quietly(Run(job, "check"), None)):
            raise JobError.of(path, [str(found)])
        shown += ", and repeats its bits"
    return shown


@app.command
def audit(url: Url, /) -> int:
    """Show how often each epoch of a run used its samples, over all attempts.

    Ends with 1 if not each exactly once.
    """
    with busy(f"reading {url}"), runs_at(url) as runs:
        from midstride.engine.runs.audit import Audit  # with torch, which takes seconds
        from midstride.engine.runs.audit import audit as audit_of

        audits, refused = list[tuple[str, Audit]](), list[str]()
        for name, store in runs:
            try:
                audits.append((name, audit_of(store.url)))
            except EngineError as error:
                if len(runs) == 1:
                    raise
                refused.append(str(error))  # the other runs of the store can be audited
    for name, found in audits:
        show_audit(name, found)
    for reason in refused:
        show_error(reason)
    return 1 if refused or not all(found.is_clean for _, found in audits) else 0


def _usage_error(error: CycloptsError) -> str:
    """Return the fault of a command line, and where to read on."""
    message = str(error)
    if isinstance(error, UnusedCliTokensError):
        way = "; write --set KEY=VALUE, without spaces" if "--set" in (error.root_input_tokens or ()) else ""
        message = f"unexpected argument: {' '.join(error.unused_tokens or ())!r}{way}"
    elif (
        isinstance(error, MissingArgumentError)
        and (missing := error.argument)
        and not (error.keyword or missing.tokens)
    ):
        message = ": ".join(filter(None, [f"{missing.name} is missing", missing.parameter.help]))
    return f"{message}\n{' '.join(['midstride', *(error.command_chain or ()), '--help'])} lists what can be given."


def main(commands: Callable[..., object] = app, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; print errors as one block on standard error.

    Errors of ours have no traceback.
    """
    tokens = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = commands(tokens, exit_on_error=False, print_error=False, result_action="return_value")
        print(end="", flush=True)  # what cannot be written is told of here, not at Python's end
        sys.exit(code if isinstance(code, int) else 0)
    except CycloptsError as error:
        show_error(_usage_error(error))
        sys.exit(2)
    except EngineError as error:
        show_error(str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(StopRequested.exit_code)
    except OSError:
        gone = reader_has_gone()
        why = "" if gone else surroundings_fault()
        if not (gone or why):
            raise
        if why:
            show_error(why)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python writes at its end
        sys.exit(1)
