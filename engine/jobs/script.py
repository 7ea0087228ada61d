"""The script of a job, run in this process: its `Loop` trains."""

import runpy
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from midstride.engine.config.import_paths import make_importable
from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import EngineError, JobError, StopRequested, UserCodeError, UserError
from midstride.engine.loop.script_job import ScriptJob, running
from midstride.engine.session.replay_plan import ReplayPlan
from midstride.engine.world import World

__all__ = ["check_script", "run_script", "try_script"]

#: errors of code, which the next attempt would meet again if they come before the loop
_OF_CODE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    SyntaxError,
    TypeError,
    ValueError,
)
#: exit code of a script whose arguments are wrong, by argparse
_WRONG_ARGUMENTS = 2


def check_script(job: TrainingJob) -> Path:
    """Return the path of the job's script.

    Raises:
        JobError: there is none.
        UserCodeError: it is no Python.
    """
    assert job.script is not None
    path = Path(job.folder or ".") / job.script
    try:
        with tokenize.open(path) as file:
            compile(file.read(), str(path), "exec")
    except OSError as error:
        there = ", ".join(sorted(one.name for one in path.parent.glob("*.py"))[:12]) or "no Python files"
        raise JobError.of(f"job {job.name}", [f"script: {path}: {error.strerror}; its folder has {there}"]) from None
    except (SyntaxError, ValueError) as error:
        raise UserCodeError.of(f"compiling {path}", error) from error
    return path


def run_script(running_job: ScriptJob) -> None:
    """Run the script of a job to its end, as `python SCRIPT ARGS` would.

    Raises:
        UserError: it ended without a training, by the exit code of wrong arguments, or by an error before its loop.
        EngineError: it ended by another exit code.
    """
    job = running_job.job
    path = check_script(job)
    with running(running_job), _as_program(path, job):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            _raise_for(end.code, job)
        except Exception as error:
            _name_replay(error, running_job)
            if running_job.has_begun or isinstance(error, EngineError) or not isinstance(error, _OF_CODE):
                raise
            raise UserCodeError.of(f"{job.script}, before its loop", error) from error
        if not running_job.has_begun:
            raise UserError(
                f"{job.script} ended before a loop: build Loop() in it, and iterate over loop.epochs or loop.steps"
            )


def _name_replay(error: Exception, running_job: ScriptJob) -> None:
    """Add the command that replays the step to an error of the script in its loop."""
    progress = running_job.progress
    is_replay = running_job.is_trial or ReplayPlan.from_environment() is not None
    if progress is None or progress.finished or not running_job.has_begun or is_replay:
        return
    if not isinstance(error, EngineError):
        error.add_note(f"look into it:  midstride replay {running_job.url} --step {progress.step + 1}")


def _raise_for(code: object, job: TrainingJob) -> None:
    if code is None or code == 0:
        return
    kind = UserError if code == _WRONG_ARGUMENTS else EngineError
    said = f"exit code {code}" if isinstance(code, int) else str(code)
    raise kind(f"{job.script} ended by sys.exit: {said}. Its command line: {' '.join(job.args) or 'no arguments'}")


@contextmanager
def _as_program(path: Path, job: TrainingJob) -> Iterator[None]:
    """Give the script its arguments, and its folder first among those to import from."""
    before = sys.argv, [*sys.path]
    make_importable(job.folder or Path.cwd())
    make_importable(path.parent)
    sys.argv = [str(path), *job.args]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before


def try_script(job: TrainingJob) -> None:
    """Run the job's script until its first batch is done, in this process.

    The run is removed again. The script runs to its end if it has no boundary after that batch.

    Raises:
        UserError: as `run_script` does.
    """
    if World.from_environment().size > 1:
        return
    with tempfile.TemporaryDirectory(prefix="midstride-check-") as folder:
        trial = ScriptJob(job.model_copy(update={"loggers": ()}), f"{folder}/run", is_trial=True)
        try:
            run_script(trial)
        except StopRequested:
            return
        finally:
            trial.close()
