"""Flow of a night: train on new data and promote the result if it beats the champion."""

from typing import Annotated, cast

from prefect import flow
from prefect.runtime import flow_run
from pydantic import Field

from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import EngineError
from midstride.engine.launch.job_fork_server import job_fork_server
from midstride.engine.registry.night_report import NightlyReport
from midstride.engine.registry.nightly import DATE, NightlyRun
from midstride.flows.run_states import KEPT, PROMOTED, cancelled_if_paused, completed, failed, nightly_name
from midstride.flows.train import attempts_so_far, prepare_deployed_run, run_launch
from midstride.tasks.compare import compare_and_promote
from midstride.tasks.credentials import credentials_of
from midstride.tasks.job_argument import JobLike, Text, as_job
from midstride.tasks.prepare import prepare_data
from midstride.tasks.report import publish_nightly_report, publish_report, stops_recorded

__all__ = ["nightly"]

Date = Annotated[
    Text, Field(pattern=f"^({DATE})?$", title="Date", description="Date of the data; that of the start if empty.")
]
IfNewData = Annotated[bool, Field(title="If new data", description="Train only on data that differ from the last.")]


@flow(name="nightly", flow_run_name=nightly_name)
def nightly(job: JobLike, date: Date = "", if_new_data: IfNewData = False) -> NightlyReport:
    """Train `job` on a date's data in a fresh run. Promote the result if it beats the champion.

    The run is named after the job and the date. Started again for the same date, the flow resumes it, or returns the
    decision. A night that fails changes no champion.

    Args:
        job: a job, or the path of its file. "{date}" in its arguments is the date.
        date: of the data; that of the scheduled start if empty, in this machine's time zone.
        if_new_data: train only if the data differ from those of the last night.
    """
    try:
        with cancelled_if_paused():
            report = _night(as_job(job), date, if_new_data)
    except EngineError as error:
        return cast(NightlyReport, failed(error))
    promoted = report.decision is not None and report.decision.promoted
    return completed(report, PROMOTED if promoted else KEPT, report.verdict)


def _night(job: TrainingJob, date: str | None, if_new_data: bool) -> NightlyReport:
    prepare_deployed_run(job)
    with credentials_of(job), job_fork_server(job):
        night = NightlyRun.begin(job, date or flow_run.scheduled_start_time.astimezone().strftime("%Y-%m-%d"))
        if decision := night.decision():
            return publish_nightly_report(night, decision)
        forgiven = attempts_so_far(night.run)
        data = prepare_data(night.job)
        if if_new_data and not night.is_new(data):
            return publish_nightly_report(night)
        with stops_recorded(night.run):
            run_launch(night.run, data, forgiven)
            decision = compare_and_promote(night.job, night.run.name, data, night.date)
        publish_report(night.job, night.run.name, decision.challenger)
        return publish_nightly_report(night, decision)
