"""Deployments: a flow, a resolved job and a schedule, as Prefect's server keeps them."""

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any
from zoneinfo import available_timezones

from prefect import Flow, get_client
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.deployments.runner import DeploymentApplyError, RunnerDeployment
from prefect.exceptions import ObjectNotFound
from prefect.schedules import Cron
from prefect.settings import get_current_settings
from prefect.types.entrypoint import EntrypointType

from midstride.engine.config.job import TrainingJob
from midstride.engine.config.yaml_file import apply_overrides
from midstride.engine.errors import JobError
from midstride.engine.jobs.portability import relative_paths
from midstride.engine.registry.nightly import nightly_errors
from midstride.flows.run_states import TAG
from midstride.flows.serve import serve_until_asked
from midstride.flows.server import name_faults, need_server
from midstride.tasks.prefect_internals import show_first

__all__ = ["FLOWS", "deploy", "serve"]


#: name -> where the flow is; a worker imports it from there, so that no code has to be pulled
FLOWS = {
    "train": "midstride.flows.train:train",
    "nightly": "midstride.flows.nightly:nightly",
    "evaluate": "midstride.flows.evaluate:evaluate",
}
#: time zone of a schedule that names none
_ZONE = "UTC"


def deploy(
    job: TrainingJob,
    name: str,
    *,
    pool: str,
    flow: str = "train",
    cron: str | None = None,
    timezone: str | None = None,
    variables: Sequence[str] = (),
) -> str:
    """Deploy `flow` with `job` to a work pool, replacing the job's `name`. Return its address.

    Args:
        job: the job, resolved: a worker can start each run in another folder.
        name: of the deployment.
        pool: the work pool; it must be there.
        flow: one of `FLOWS`.
        cron: when it runs, such as "0 2 * * *"; on request alone if empty.
        timezone: in which `cron` is meant; UTC if empty.
        variables: job variables of the pool, each as "image=..." or "env.AWS_PROFILE=...".

    Raises:
        JobError: with every fault at once: names, relative paths, the schedule, variables, a pool that is not there, a
            name that the deployment of another job has.
        ServerError: there is no server, or it does not answer.
    """
    need_server()
    chosen: dict[str, Any] = {}
    faults = apply_overrides(chosen, variables, option="--variable")
    with get_client(sync_client=True) as client:
        faults += [*_pool_faults(client, pool), *_other_job_faults(client, job, name, flow)]
        deployment = _deployment(job, name, flow, cron, timezone, earlier=faults)
        deployment.work_pool_name, deployment.job_variables = pool, chosen
        try:
            identity = deployment.apply()
        except DeploymentApplyError as error:
            raise JobError.of(f"deployment {name} of job {job.name}", [f"the server says: {error}"]) from error
    base = get_current_settings().ui_url or str(get_current_settings().api.url).removesuffix("/api")
    return f"{base}/deployments/deployment/{identity}"


def serve(
    job: TrainingJob, name: str, *, flow: str = "train", cron: str | None = None, timezone: str | None = None
) -> None:
    """Deploy `flow` with `job` and run due runs in child processes until a request to stop.

    Arguments and errors are those of `deploy`. There is no pool and no worker.
    """
    need_server()
    with get_client(sync_client=True) as client:
        faults = _other_job_faults(client, job, name, flow)
    serve_until_asked(_deployment(job, name, flow, cron, timezone, earlier=faults))


def _deployment(
    job: TrainingJob, name: str, flow: str, cron: str | None, timezone: str | None, *, earlier: Sequence[str] = ()
) -> RunnerDeployment:
    """Return the deployment, which is not registered yet; `earlier` are faults found before."""
    faults = [*earlier, *name_faults("--name", name), *_schedule_faults(cron, timezone), *relative_paths(job)]
    if flow == "nightly":
        faults += nightly_errors(job)
    if flow == "evaluate" and cron is not None:
        faults.append(f"--cron {cron!r}: each evaluation needs the name of a run: --param run=NAME at its start")
    if faults:
        raise JobError.of(f"deployment {name} of job {job.name}", faults)
    if flow == "nightly" and cron and not _is_daily(cron):
        print(  # Prefect's log is not shown by the commands
            f"--cron {cron!r}: starts several nights a day, but a date is trained and decided once: later ones "
            f"resume a failed night, or end at once. To train each time, use --flow train",
            file=sys.stderr,
        )
    deployment = RunnerDeployment.from_flow(
        _flow(flow),
        name,
        schedules=[Cron(cron, timezone=timezone or _ZONE)] if cron is not None else [],
        parameters={"job": job.model_dump(mode="json")},
        description=f"{'Tests' if flow == 'evaluate' else 'Trains'} {job.name}: {job.code}.",
        tags=[TAG],
        entrypoint_type=EntrypointType.MODULE_PATH,
        # A night that takes too long makes the next one wait. To cancel the newer one instead would cancel a
        # Retry, too.
        concurrency_limit=ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE)
        if cron is not None
        else None,
    )
    show_first(deployment, "run", "fork_of", "fork_step", "step", "take_over", "date", "if_new_data")
    return deployment


def _flow(name: str) -> Flow[..., Any]:
    if name not in FLOWS:
        raise JobError(f"--flow {name}: choose one of {', '.join(FLOWS)}")
    module, _, attribute = FLOWS[name].partition(":")
    flow: Flow[..., Any] = getattr(import_module(module), attribute)
    return flow


def _schedule_faults(cron: str | None, timezone: str | None) -> list[str]:
    if cron is None:
        return [] if timezone is None else [f"--timezone {timezone}: says when --cron is meant, which is missing"]
    faults = []
    if timezone and timezone not in (zones := available_timezones()):
        close = get_close_matches(timezone, zones, n=1)
        hint = f"did you mean {close[0]}?" if close else "use Europe/Berlin"
        faults.append(f"--timezone {timezone}: is unknown, {hint}")
    try:
        Cron(cron, timezone=_ZONE)
    except ValueError as error:
        faults.append(f"--cron {cron!r}: {str(error).splitlines()[0]}; such as: --cron '0 2 * * *'")
    return faults


def _is_daily(cron: str) -> bool:
    """Whether a schedule names one minute and one hour, or says @daily or a longer time."""
    minute, *rest = cron.split()
    return minute.isdigit() and rest[0].isdigit() if rest else minute != "@hourly"


def _other_job_faults(client: Any, job: TrainingJob, name: str, flow: str) -> list[str]:
    try:
        there = client.read_deployment_by_name(f"{flow}/{name}").parameters.get("job", {}).get("name")
    except (ObjectNotFound, ValueError):  # none, or no name, which is told elsewhere
        return []
    if there in (None, job.name):
        return []
    return [
        f"--name {name}: is the deployment of job {there}; use another name, or delete it: prefect deployment delete "
        f"{flow}/{name}"
    ]


def _pool_faults(client: Any, pool: str) -> list[str]:
    if faults := name_faults("--pool", pool):
        return faults
    try:
        client.read_work_pool(pool)
    except ObjectNotFound:
        there = ", ".join(one.name for one in client.read_work_pools()) or "none yet"
        return [f"--pool {pool}: does not exist; there are: {there}; create it: midstride setup-server --pool {pool}"]
    return []
