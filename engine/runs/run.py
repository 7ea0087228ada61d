"""A run: a job under a name, its folder and files. No torch."""

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from midstride.engine.config.job import TrainingJob
from midstride.engine.config.options import SnapshotOptions
from midstride.engine.config.validation import validation_errors
from midstride.engine.errors import JobError, SnapshotDamaged, UserError
from midstride.engine.formatting import format_names
from midstride.engine.session.attempts import AttemptLog
from midstride.engine.snapshots.catalog import SNAPSHOTS, SnapshotCatalog
from midstride.engine.snapshots.parent import PARENT, open_run
from midstride.engine.storage.checksums import decode_document, encode_document
from midstride.engine.storage.store import Store
from midstride.engine.storage.urls import absolute_url

__all__ = ["JOB_FILE", "Run", "check_there", "is_run", "job_of", "run_at", "runs_in"]

#: in the run's folder: the job as it was resolved for the newest attempt
JOB_FILE = "job.json"


class Run:
    """One run of a job.

    Args:
        job: the training.
        name: of the run.

    Raises:
        JobError: the name cannot be that of a folder.
    """

    def __init__(self, job: TrainingJob, name: str) -> None:
        self.job, self.name, self.url = job, name, job.run_url(name)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Return the run that a session's document names."""
        return cls(TrainingJob.model_validate(document["job"]), document["run"])

    def document(self, attempt: int, started: float = 0.0) -> dict[str, Any]:
        """Return the document, as JSON values, that the processes of attempt number `attempt` get.

        Args:
            attempt: its number.
            started: when it started, by which it differs from an attempt of a deleted run of the same name.
        """
        return {"run": self.name, "attempt": attempt, "started": started, "job": self.job.model_dump(mode="json")}

    def save_job(self) -> None:
        """Write the job into the run's folder, so that commands that show the run need no job file."""
        self.store.write(JOB_FILE, encode_document({"job": self.job.model_dump(mode="json")}))

    def saved_job(self) -> bytes:
        """Return the document that `save_job` has written last; empty if there is none."""
        try:
            return self.store.read(JOB_FILE)
        except FileNotFoundError:
            return b""

    def restore_job(self, saved: bytes) -> None:
        """Write the result of `saved_job`."""
        if saved:
            self.store.write(JOB_FILE, saved)
        else:
            self.store.remove(JOB_FILE)

    @cached_property
    def store(self) -> Store:
        """The run's folder."""
        return open_run(self.url, self.job.store_terms)

    @property
    def attempts(self) -> AttemptLog:
        """The log of its attempts."""
        return AttemptLog(self.store)

    @property
    def catalog(self) -> SnapshotCatalog:
        """Its snapshots."""
        return SnapshotCatalog(self.store)


def job_of(store: Store) -> TrainingJob | None:
    """Return the job of the run in `store`; None for a script's run or an unreadable document."""
    try:
        return TrainingJob.model_validate(decode_document(store.read(JOB_FILE), JOB_FILE, job=dict)["job"])
    except (FileNotFoundError, SnapshotDamaged, ValueError):
        return None


def check_there(store: Store) -> None:
    """Check that `store` holds a run that has been started.

    Raises:
        UserError: it does not; runs in it or beside it are named.
    """
    if is_run(store):
        return
    if runs := runs_in(store):
        raise UserError(f"{store.url} holds runs and is none: name one of them, such as {store.url}/{runs[0]}")
    above, _, name = store.url.rstrip("/").rpartition("/")
    runs = runs_in(Store.open(above))
    others = f"it has {format_names(runs)}" if runs else "midstride fit JOB --run NAME starts one"
    raise UserError(f"there is no run {name!r} in {above}: {others}")


def is_run(store: Store) -> bool:
    """Whether `store` holds a run that has been started."""
    return bool({JOB_FILE, "run.json", "lease", SNAPSHOTS, PARENT} & {*store.list()})


def runs_in(store: Store) -> list[str]:
    """Return the names of the runs in `store`, a folder of runs."""
    return [name for name in store.list() if is_run(store.at(name))]


def run_at(url: str, overrides: Iterable[str] = ()) -> Run:
    """Return the run at `url`, a folder or fsspec URL, with the job of its newest attempt.

    Args:
        url: of the run; it may have been moved since.
        overrides: choices set from outside, such as "data_args.folder=/data"; values are YAML.

    Raises:
        UserError: there is no run, or a script trains it.
        JobError: an override is wrong.
    """
    # Ranks read no YAML.
    from midstride.engine.config.yaml_file import apply_overrides

    store = Store.open(absolute_url(url))
    with store.errors_explained("read"):
        check_there(store)
        if (job := job_of(store)) is None:
            raise UserError(f"{url} is no run of a job: it has no {JOB_FILE}. Name a run's folder or URL")
    runs, _, name = store.url.rstrip("/").rpartition("/")
    snapshots = job.snapshots or SnapshotOptions.model_validate({})
    document = job.model_copy(update={"snapshots": snapshots.model_copy(update={"url": runs})}).model_dump(mode="json")
    faults = apply_overrides(document, overrides, example="data_args.folder=/data")
    try:
        chosen = TrainingJob.model_validate(document)
    except ValidationError as error:
        raise JobError.of(url, [*faults, *validation_errors(error, TrainingJob)]) from None
    if faults:
        raise JobError.of(url, faults)
    return Run(chosen.resolved(Path.cwd()), name)
