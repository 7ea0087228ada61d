"""One night of a job: a run named after its date, from a fixed plan to a final decision.

In the run's folder:

    night.json      the plan: from whose weights the run begins; retries keep to it
    decision.json   decision of the night, and its data
"""

import logging
import re
import time
from collections.abc import Mapping
from datetime import datetime
from types import NoneType
from typing import Any, Self

from midstride.engine.config.arguments import map_texts, texts_in
from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import JobError, SnapshotDamaged
from midstride.engine.formatting import format_value
from midstride.engine.registry.comparison import PromotionDecision, compare, with_gates
from midstride.engine.registry.registry import ModelRegistry
from midstride.engine.runs.run import Run, job_of
from midstride.engine.state.bounds import damaged_on_error
from midstride.engine.storage.checksums import Kind, encode_document
from midstride.engine.storage.listing import FolderListing
from midstride.engine.storage.store import Store
from midstride.engine.storage.verification import read_document

__all__ = [
    "DATE",
    "NightlyRun",
    "date_errors",
    "date_to_try",
    "judge",
    "judged_by",
    "metric_of",
    "module_errors",
    "nightly_errors",
    "promote_if_better",
    "with_date",
]

#: 2026-03-01, or 2026-03-01T1400 where data come more than once a day
DATE = r"\d{4}-\d{2}-\d{2}(T\d{2}(\d{2})?)?"
_PLACEHOLDER = "{date}"
_ABSENT = object()
#: keys of a job in which it stands, beside the arguments of a script
_DATED = ("module_args", "data_args")

log = logging.getLogger(__name__)


class NightlyRun:
    """A started night.

    Args:
        run: its job has the date in its arguments.
        date: of the data.
    """

    def __init__(self, run: Run, date: str) -> None:
        self.run, self.date = run, date
        self.registry = ModelRegistry.of(run.job)
        self._store = run.store

    @property
    def job(self) -> TrainingJob:
        """Tonight's job."""
        return self.run.job

    @classmethod
    def begin(cls, job: TrainingJob, date: str) -> Self:
        """Return the night of `date`, planned now unless it was before.

        Raises:
            JobError: the date is invalid, or the job lacks a setting of nights.
        """
        if faults := nightly_errors(job, date):
            raise JobError.of(f"job {job.name}", faults)
        night = cls(Run(with_date(job, date), f"{job.name}-{date}"), date)
        with night._store.errors_explained("written"):
            champion = night.registry.current() if job.nightly.warm_start else None
            plan = {"date": date, "champion": champion and champion.number, "time": time.time()}
            night._store.create("night.json", encode_document(plan))
            begun: dict[str, Any] = _read(night._store, "night.json", champion=(int, NoneType)) or plan
            if begun["champion"] is not None:
                weights = night.registry.weights_url(night.registry.champion(begun["champion"]))
                return cls(Run(night.job.model_copy(update={"weights": weights}), night.run.name), date)
        return night

    @property
    def url(self) -> str:
        """URL of the run."""
        return self.run.url

    def decision(self) -> PromotionDecision | None:
        """Return the decision of the night; None before it."""
        found = _read(self._store, "decision.json", decision=dict)
        with damaged_on_error(f"{self._store.url}/decision.json"):
            return PromotionDecision.model_validate(found["decision"]) if found else None

    def decide(self, compared: Mapping[str, Any]) -> PromotionDecision:
        """Promote the run if it is better. Repeating a decided night changes nothing.

        Args:
            compared: result of the operation "compare".

        Raises:
            Overtaken: the champion has changed meanwhile; compare again.
        """
        return promote_if_better(self.run, compared, self.registry)

    def close(self, decision: PromotionDecision, data: FolderListing) -> None:
        """Record the decision of the night and its data."""
        self._store.write(
            "decision.json", encode_document({"decision": decision.model_dump(), "data": data, "time": time.time()})
        )

    def is_new(self, data: FolderListing) -> bool:
        """Return True if names or sizes of `data` differ from those of the newest decided night.

        Raises:
            JobError: the data module does not say where its data are.
        """
        if data["folder"] is None:
            raise JobError(
                f"{self.job.script or self.job.data} keeps no folder, so whether its data are new is unknown: "
                f"{'' if self.job.script else 'set self.folder in it, or '}leave --if-new-data out"
            )
        runs = Store.open(self.job.store_url, self.job.store_terms)
        nights = rf"{re.escape(self.job.name)}-{DATE}"
        for name in sorted(runs.list(), reverse=True):
            if not re.fullmatch(nights, name):
                continue
            try:
                found = _read(runs.at(name), "decision.json", data=dict)
            except SnapshotDamaged as error:  # to train once more than is needed loses nothing
                log.warning("the data of the last night are unknown, those of this one count as new: %s", error)
                return True
            if found:
                # The folder can have the date in its name.
                return {**data, "folder": None} != {**found["data"], "folder": None}
        return True


def judge(job: TrainingJob, compared: Mapping[str, Any]) -> PromotionDecision:
    """Return the decision of `job` on the result of the operation "compare".

    Args:
        job: has a monitor.
        compared: result of that operation.

    Raises:
        JobError: the test did not log a value that decides.
    """
    assert job.monitor is not None
    decision = compare(
        compared["challenger"],
        compared["champion"],
        metric=metric_of(job),
        mode=job.monitor.mode,
        margin=job.nightly.margin,
        over=compared["over"],
    )
    return with_gates(decision, job.nightly.gates)


def promote_if_better(run: Run, compared: Mapping[str, Any], registry: ModelRegistry) -> PromotionDecision:
    """Promote `run` if it is better than the champion; return the decision.

    A run that was promoted before keeps that decision.

    Args:
        run: of the registry's job.
        compared: result of the operation "compare".
        registry: of the job.

    Raises:
        Overtaken: the champion has changed meanwhile; compare again.
    """
    if (done := registry.promoted(run.name)) is not None and done.decision is not None:
        return done.decision
    decision = judge(run.job, compared)
    if decision.promoted:
        registry.promote(run, compared["weights"], decision)
    return decision


def judged_by(job: TrainingJob) -> dict[str, str]:
    """Return the test values that decide, with the key of the job that names each."""
    return (
        {**dict.fromkeys(job.nightly.gates, "nightly.gates"), metric_of(job): "nightly.metric"} if job.monitor else {}
    )


def metric_of(job: TrainingJob) -> str:
    """Return the name of the value that decides: chosen, or the monitor's as the test logs it.

    val/loss is test/loss, val_accuracy is test_accuracy. A script logs the monitor's value itself.
    """
    assert job.monitor is not None
    if job.script is not None:  # which logs its test by itself
        return job.nightly.metric or job.monitor.metric
    return job.nightly.metric or re.sub(r"^val(?![a-zA-Z])", "test", job.monitor.metric)


def nightly_errors(job: TrainingJob, date: str | None = None) -> list[str]:
    """Return messages on a `job` that no night can train, and on an invalid `date`."""
    faults = []
    if date is not None and not _is_date(date):
        faults.append(f"date: {date!r} is no date; write it as 2026-03-01, or 2026-03-01T1400")
    if job.monitor is None:
        faults.append("monitor: is missing; name the value by which a challenger is judged")
    if job.snapshots is None:
        faults.append("snapshots: are switched off; switch them on to keep weights for a promotion")
    return faults


def module_errors(run: Run) -> list[str]:
    """Return a message for each argument by which `run` trained another module than its job's."""
    before, job = job_of(run.store), run.job
    if before is None:
        return []
    if before.module != job.module:
        return [f"module: run {run.name} has trained {before.module}, and this job has {job.module}"]
    faults = []
    for name in sorted({*before.module_args, *job.module_args}):
        theirs, ours = (args.get(name, _ABSENT) for args in (before.module_args, job.module_args))
        if theirs != ours and _PLACEHOLDER not in repr(ours):
            then, now = ("no value" if one is _ABSENT else format_value(name, one) for one in (theirs, ours))
            remedy = "leave it out" if theirs is _ABSENT else f"add --set module_args.{name}=..."
            faults.append(f"module_args.{name}: run {run.name} has trained with {then}, this job has {now}; {remedy}")
    return faults


def date_errors(job: TrainingJob) -> list[str]:
    """Return a message for each argument of `job` with "{date}", which only a night fills in."""
    found = [pair for group, value in _dated(job).items() for pair in texts_in(value, group)]
    return [
        f"{key}: {_PLACEHOLDER} is the date of a night: train it by midstride nightly JOB --date ..., or write it out, "
        f'by --set {key}="..."'
        for key, text in found
        if _PLACEHOLDER in text
    ]


def date_to_try(job: TrainingJob, date: str | None) -> str | None:
    """Return the date of the night that checks `job`; None if the job is not for nights.

    Args:
        job: is for nights if it has the key `nightly` or the date in its arguments.
        date: of the night, "" for today. With a date, each job is checked.
    """
    if date is None and "nightly" not in job.model_fields_set and not date_errors(job):
        return None
    return date or datetime.now().strftime("%Y-%m-%d")


def with_date(job: TrainingJob, date: str) -> TrainingJob:
    """Return `job` with `date` where its arguments have "{date}"."""

    def dated(text: str) -> str:
        return text.replace(_PLACEHOLDER, date)

    arguments = {key: map_texts(value, dated) for key, value in _dated(job).items()}
    return job.model_copy(update={**arguments, "args": tuple(arguments["args"])})


def _dated(job: TrainingJob) -> dict[str, Any]:
    return {"args": [*job.args], **{key: getattr(job, key) for key in _DATED}}


def _is_date(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return re.fullmatch(DATE, text) is not None


def _read(store: Store, path: str, **kinds: Kind) -> dict[str, Any] | None:
    try:
        return read_document(store, path, **kinds)
    except FileNotFoundError:
        return None
    except SnapshotDamaged as error:
        raise SnapshotDamaged(
            f"{error}: restore it from a copy, or remove it to plan and judge the night again"
        ) from error
