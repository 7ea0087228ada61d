"""The job that runs a script: its `Loop` takes run, seed and snapshots from it."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from midstride.engine.checkpointing.context import RunSettings
from midstride.engine.checkpointing.run_store import run_url_of
from midstride.engine.config.job import TrainingJob
from midstride.engine.config.loggers import LoggerOptions, checked_loggers
from midstride.engine.config.options import SnapshotOptions, checked_options
from midstride.engine.errors import JobError, UserError
from midstride.engine.loggers.build_logger import logger_errors
from midstride.engine.modules.progress import Progress
from midstride.engine.session.replay_plan import ReplayPlan

__all__ = ["LoopArguments", "ScriptJob", "running", "script_job"]

_NO_RUN = (
    'Loop() has no run: name the folder or URL of its snapshots, such as Loop("runs/first"). A job with script: brings '
    "its own"
)
_IDENTITY = ("script", "args", "weights")


@dataclass(frozen=True)
class LoopArguments:
    """The arguments of a `Loop`; see there.

    Args:
        take_over: take the run from another process.
        identity: further entries of the run's identity.
        weights: folder or URL of the weights that a new run starts from.
    """

    run: str | os.PathLike[str] | None
    seed: int | None
    snapshots: SnapshotOptions | Mapping[str, Any] | None
    accept_change: Collection[str]
    loggers: Sequence[str | Mapping[str, Any] | LoggerOptions]
    deterministic: bool
    accelerator: str
    enable_progress_bar: bool
    take_over: bool
    gpus: int | list[int] | None = None
    auto_select_gpus: bool = False
    identity: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None

    @property
    def url(self) -> str:
        """URL of the run.

        Raises:
            UserError: there is none, or it names no folder.
        """
        if self.run is None:
            raise UserError(_NO_RUN)
        return run_url_of(self.run)

    def settings(self) -> RunSettings:
        """Return the settings of the run, validated.

        Raises:
            JobError: with all faults.
        """
        asked, unknown = checked_loggers(self.loggers)
        faults = [*unknown, *logger_errors(asked)]
        if self.snapshots is None:
            faults.append("snapshots: None takes none, and without them a Loop has nothing to do: leave the option out")
        seed = self.seed or 0
        options, checked = checked_options({}, self.snapshots, seed, faults, "Loop(...)")
        accepted = (self.accept_change,) if isinstance(self.accept_change, str) else tuple(self.accept_change)
        return RunSettings(options, checked, seed, accepted, self.identity, asked)


class ScriptJob:
    """A job while its script runs in this process.

    Args:
        job: the job.
        url: URL of the run.
        is_trial: whether the loop stops after its first batch.
    """

    def __init__(self, job: TrainingJob, url: str, *, is_trial: bool = False) -> None:
        self.job, self.url, self.is_trial = job, url, is_trial
        #: counts of the script's loop; None before it is built
        self.progress: Progress | None = None
        #: whether the loop has begun
        self.has_begun = False
        self._close: Callable[[], None] | None = None

    def follow(self, progress: Progress, close: Callable[[], None]) -> None:
        """Take the counts of the script's loop, and the function that lets go of its run.

        Raises:
            UserError: the script has built a Loop already.
        """
        if self.progress is not None:
            raise UserError(f"{self.job.script} builds a second Loop, and a job has one run. Write a job for each")
        self.progress, self._close = progress, close

    def begin(self) -> None:
        """Record that the loop has begun."""
        self.has_begun = True

    def close(self) -> None:
        """Let go of the run."""
        if self._close is not None:
            self._close()

    def arguments(self, given: LoopArguments, default: SnapshotOptions) -> LoopArguments:
        """Return the arguments of the script's Loop, completed by the job.

        Args:
            given: arguments that the script passes.
            default: snapshots of a script that chooses none.

        Raises:
            JobError: script and job disagree; the message has both values.
        """
        job, world = self.job, self.job.world
        if faults := self._disagreements(given, default):
            raise JobError.of(f"{job.script} as a script of job {job.name}", faults)
        is_replay = ReplayPlan.from_environment() is not None  # in another folder, and told to no tracker
        named = [options.in_project(job.name) for options in job.loggers]
        accelerator = given.accelerator if world.accelerator == "auto" else world.accelerator
        deterministic = job.trainer.deterministic
        accepted = (given.accept_change,) if isinstance(given.accept_change, str) else given.accept_change
        return replace(
            given,
            run=self.url,
            seed=job.seed,
            snapshots=job.snapshots,
            accept_change=(*accepted, *job.accept_change),
            loggers=() if is_replay else named or given.loggers,
            deterministic=given.deterministic if deterministic is None else deterministic,
            accelerator=accelerator,
            gpus=world.gpus,
            auto_select_gpus=world.auto_select_gpus,
            enable_progress_bar=given.enable_progress_bar and job.trainer.enable_progress_bar,
            take_over=True,  # the launcher has looked
            identity={key: getattr(job, key) for key in _IDENTITY},
            weights=job.weights,
        )

    def _disagreements(self, given: LoopArguments, default: SnapshotOptions) -> list[str]:
        job, world, pairs = self.job, self.job.world, list[tuple[str, Any, str, Any]]()
        is_replay = ReplayPlan.from_environment() is not None
        if given.run is not None and not is_replay:
            pairs.append(("run", given.url, "its run is", self.url))
        if given.seed is not None:
            pairs.append(("seed", given.seed, "the job has seed:", job.seed))
        if given.snapshots is not default and not is_replay:
            said = given.snapshots
            chosen = said.model_dump(exclude_unset=True) if isinstance(said, SnapshotOptions) else dict(said or {})
            for name, value in chosen.items():
                there = getattr(job.snapshots, name, None)
                pairs.append((f"snapshots {name}", value, f"the job has snapshots.{name}:", there))
        if given.loggers and job.loggers:
            faults = ["Loop has loggers, and the job, too: leave them out of the script"]
        else:
            faults = []
        if "auto" not in (given.accelerator, world.accelerator):
            pairs.append(("accelerator", given.accelerator, "the job has world.accelerator:", world.accelerator))
        return faults + [
            f"Loop has {name} {value!r}, and {where} {there!r}: leave it out of the script, or write the same in both"
            for name, value, where, there in pairs
            if value != there
        ]


#: the job of this process, if it runs the script of one
_RUNNING: list[ScriptJob] = []


@contextmanager
def running(job: ScriptJob) -> Iterator[ScriptJob]:
    """Let the Loop that is built in the block belong to `job`."""
    _RUNNING.append(job)
    try:
        yield job
    finally:
        _RUNNING.remove(job)


def script_job() -> ScriptJob | None:
    """Return the job whose script runs in this process; None if a person has started it."""
    return _RUNNING[-1] if _RUNNING else None
