"""A run: a job under a name, its folder and what lies there. Needs no torch."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self

from midstride.engine.config.job import TrainingJob
from midstride.engine.session.attempts import Ledger
from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.storage.store import Store

__all__ = ["Run"]


class Run:
    """One run of a job.

    Args:
        job: what is trained.
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

    def document(self, attempt: int) -> dict[str, Any]:
        """Return what the processes of attempt number `attempt` are told, as JSON."""
        return {"run": self.name, "attempt": attempt, "job": self.job.model_dump(mode="json")}

    @cached_property
    def store(self) -> Store:
        """The run's folder."""
        return Store.open(self.url, self.job.store_terms)

    @property
    def attempts(self) -> Ledger:
        """The log of its attempts."""
        return Ledger(self.store)

    @property
    def catalog(self) -> SnapshotCatalog:
        """Its snapshots."""
        return SnapshotCatalog(self.store)
