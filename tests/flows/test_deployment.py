"""Deployments on a real server: run by a real worker, or served, and refused before they can fail at night."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from uuid import UUID

import pytest
from prefect import get_client
from prefect.cli import app as prefect
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.client.schemas.objects import FlowRun
from prefect.events import emit_event
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from support.flow_runs import Command, results, wait_for, wait_for_effect
from support.prefect_worker import Worker, ended, run_of

from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import JobError, UserError
from midstride.engine.session.attempts import AttemptLog
from midstride.engine.storage.store import Store
from midstride.flows.deployment import deploy, serve
from midstride.flows.evaluate import evaluate
from midstride.flows.run_states import TAG
from midstride.flows.server_setup import create_pool
from midstride.flows.train import train

Make = Callable[..., TrainingJob]
POOL = "tests"
FILE = Path(__file__).parents[2] / "deploy" / "prefect.yaml"


@pytest.fixture(scope="module")
def worker(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Return a worker and its process pool."""
    create_pool(POOL)
    worker = Worker(tmp_path_factory.mktemp("worker"), server, POOL)
    yield worker
    worker.stop()


def asked_for_by_events(deployment: UUID) -> list[FlowRun]:
    """Return the runs of a deployment that its triggers made."""
    of_it = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment]))
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(flow_run_filter=of_it)
    return [run for run in runs if run.created_by is not None and run.created_by.type == "AUTOMATION"]


def test_a_deployed_run_is_tested_in_training_by_another_deployment(
    make_job: Make, worker: Worker, undisturbed_alone: dict[str, bytes], tmp_path: Path
) -> None:
    job = make_job(processes=1, wait_at=17)
    address = deploy(job, "long", pool=worker.pool)
    with get_client(sync_client=True) as client:
        there = client.read_deployment_by_name("train/long")
    assert address.endswith(str(there.id))
    assert (there.entrypoint, there.path, there.pull_steps) == ("midstride.flows.train.train", None, [])
    assert TAG in there.tags
    deploy(job, "beside", pool=worker.pool, flow="evaluate")
    training = run_of("train/long")
    wait_for((tmp_path / "mark").exists, "training to wait")
    name = str(training.id)
    snapshots = partial(Store.open(job.run_url(name)).find, "snapshots")
    wait_for(lambda: "000000000015-g000001/manifest.json" in snapshots(), "the snapshot of step 15")
    before = snapshots()
    tested = ended(run_of("evaluate/beside", run=name, step=15))
    early, wrong = (evaluate(job, name, **at, return_state=True) for at in ({}, {"step": 7}))
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(training.id).state_name == "Running"
        assert snapshots() == before
        pages = [one.description for one in client.read_artifacts() if str(one.key).endswith("-test")]
    (tmp_path / "mark-over").touch()
    assert (tested.name, tested.state_name) == (f"tiny test of {name} step 15", "Completed")
    assert tested.state is not None
    said = str(tested.state.message)
    assert said.startswith("snapshot of step 15: test/accuracy 0."), said
    assert any(str(page).endswith(said) for page in pages), pages
    assert (early.name, wrong.name) == ("Failed", "Failed")
    assert "Its snapshots can be tested by their step: 5, 10, 15" in early.message
    assert "has no snapshot of step 7: choose one of" in wrong.message
    assert ended(training).state_name == "Completed"
    assert results(job, name) == undisturbed_alone
    assert evaluate(job, name, return_state=True).message.startswith("best weights: test/accuracy 0.")
    [attempt] = AttemptLog(Store.open(job.run_url(name))).attempts()
    assert attempt.outcome == "done"
    worker.wait_until_idle()


def test_an_evaluation_needs_a_run(make_job: Make, server: str) -> None:
    job = make_job(processes=1)
    create_pool("kept")
    with pytest.raises(JobError, match="each evaluation needs the name of a run: --param run=NAME"):
        deploy(job, "beside", pool="kept", flow="evaluate", cron="0 2 * * *")
    deploy(job, "beside", pool="kept", flow="evaluate")
    with pytest.raises(PrefectHTTPStatusError, match="'run' is a required property"):
        run_of("evaluate/beside")
    with pytest.raises(UserError, match="there is no run 'nope' in "):
        evaluate(job, "nope")


def test_what_is_wrong_with_a_deployment_is_said_at_once(make_job: Make, server: str) -> None:
    job = make_job(processes=1)
    with pytest.raises(JobError) as caught:
        deploy(
            job.model_copy(update={"folder": "code"}),
            "wrong",
            pool="gpus",
            cron="0 2 * *",
            timezone="Europe/Berln",
            variables=["image"],
        )
    said = str(caught.value)
    assert said.startswith("5 faults in deployment wrong of job tiny:")
    assert "--timezone Europe/Berln: is unknown, did you mean Europe/Berlin?" in said
    for part in ("--variable image: write it as", "--pool gpus: does not exist", "--cron '0 2 * *'", "folder: 'code'"):
        assert part in said
    with get_client(sync_client=True) as client, pytest.raises(ObjectNotFound):
        client.read_deployment_by_name("train/wrong")


@pytest.mark.parametrize("name", ["", " ", "a/b"])
def test_what_the_server_takes_as_no_name_is_said(make_job: Make, server: str, name: str) -> None:
    job = make_job(processes=1)
    with pytest.raises(JobError) as caught:
        deploy(job, name, pool=name)
    for option in ("--name", "--pool"):
        assert f"{option} {name!r}: is not a valid name on Prefect's server" in str(caught.value)
    with pytest.raises(JobError, match="is not a valid name"):
        serve(job, name)
    with pytest.raises(JobError, match="is not a valid name"):
        create_pool(name)


#: what a server's scheduler does for a deployment, which the embedded server of the tests has not
PLANNED = """
import asyncio, sys, uuid
from prefect.server.database import provide_database_interface
from prefect.server.models.deployments import schedule_runs

async def main():
    async with provide_database_interface().session_context(begin_transaction=True, with_for_update=True) as session:
        print(len(await schedule_runs(session, deployment_id=uuid.UUID(sys.argv[1]))))

asyncio.run(main())
"""


def planned(deployment: UUID, folder: Path) -> int:
    """Have the runs made that the schedule of a deployment asks for; return how many."""
    environment = {**os.environ, "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{folder}/prefect.db"}
    command = [sys.executable, "-c", PLANNED, str(deployment)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_deployment_keeps_its_job_and_schedule_and_is_replaced(
    make_job: Make, server: str, shared_folder: Path
) -> None:
    job = make_job(processes=1)
    create_pool("kept")
    with pytest.raises(JobError, match="pool kept: exists as a process pool, not a docker pool"):
        create_pool("kept", "docker")
    variables = ["env.AWS_PROFILE=night", "working_dir=/srv"]
    deploy(job, "nightly", pool="kept", cron="0 2 * * *", timezone="Europe/Berlin", variables=variables)
    with get_client(sync_client=True) as client:
        there = client.read_deployment_by_name("train/nightly")
    assert TrainingJob.model_validate(there.parameters["job"]) == job
    assert there.job_variables == {"env": {"AWS_PROFILE": "night"}, "working_dir": "/srv"}
    assert [(one.schedule.cron, one.schedule.timezone) for one in there.schedules] == [("0 2 * * *", "Europe/Berlin")]
    assert there.global_concurrency_limit is not None
    assert there.global_concurrency_limit.limit == 1
    assert there.concurrency_options is not None
    assert there.concurrency_options.collision_strategy == "ENQUEUE"
    assert planned(there.id, shared_folder) > 0
    deploy(job, "nightly", pool="kept")
    with get_client(sync_client=True) as client:
        again = client.read_deployment_by_name("train/nightly")
    assert (again.id, again.schedules, again.job_variables) == (there.id, [], {})


@pytest.mark.parametrize(
    ("group", "key", "value", "said"),
    [
        ("trainer", "max_stepz", 3, "'max_stepz' was unexpected"),
        ("world", "processes", 0, "field 'job.world.processes'. Failure reason: 0 is less than the minimum of 1"),
        ("snapshots", "url", "runs", "field 'job.snapshots.url'"),
        ("", "seeed", 1, "'seeed' was unexpected"),
    ],
)
def test_a_bad_parameter_makes_no_run(
    make_job: Make, server: str, group: str, key: str, value: object, said: str
) -> None:
    job = make_job(processes=1)
    create_pool("kept")
    deploy(job, "form", pool="kept")
    document = job.model_dump(mode="json")
    (document[group] if group else document)[key] = value
    with pytest.raises(PrefectHTTPStatusError) as caught:
        run_of("train/form", job=document)
    assert caught.value.response.status_code == 409
    assert said in caught.value.response.text


def test_the_deployment_of_another_job_is_not_replaced(make_job: Make, server: str) -> None:
    job = make_job(processes=1)
    create_pool("kept")
    said = r"--name taken: is the deployment of job tiny; .* prefect deployment delete train/taken"
    for replaces in (False, True):
        deploy(job, "taken", pool="kept")
        with pytest.raises(JobError, match=said):
            deploy(job.model_copy(update={"name": "other", "seed": int(replaces)}), "taken", pool="kept")
    with pytest.raises(JobError, match=said):
        serve(job.model_copy(update={"name": "other"}), "taken")


def test_a_deployed_flow_refuses_what_only_holds_in_one_folder(make_job: Make, server: str) -> None:
    job = make_job(processes=1).model_copy(update={"data_args": {"folders": ["./data"]}, "folder": ""})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "made-by-hand")
        with pytest.raises(JobError, match=r"(?s)2 faults.*folder: '.' is relative.*data_args.folders.0: './data'"):
            train(job, "homeless")


def test_the_file_of_deployments_is_what_prefect_takes(server: str, tmp_path: Path) -> None:
    create_pool("gpu")
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(FILE)]
    environment = {**os.environ, "PREFECT_API_URL": server, "PREFECT_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with get_client(sync_client=True) as client:
        by_hand = client.read_deployment_by_name("train/digits")
        nightly = client.read_deployment_by_name("nightly/digits-every-night")
    for there, flow in (by_hand, "train"), (nightly, "nightly"):
        assert (there.entrypoint, there.pull_steps or []) == (f"midstride.flows.{flow}.{flow}", [])
        assert TAG in there.tags
        assert TrainingJob.model_validate(there.parameters["job"]).folder == "/srv/jobs/digits"
    assert [(one.schedule.cron, one.schedule.timezone) for one in nightly.schedules] == [("0 2 * * *", "Europe/Berlin")]
    assert nightly.global_concurrency_limit is not None
    assert nightly.global_concurrency_limit.limit == 1

    arrived = []

    def arrive() -> None:
        arrived.append(emit_event("data.digits.arrived", resource={"prefect.resource.id": "data.digits"}))

    runs = wait_for_effect(arrive, lambda: asked_for_by_events(nightly.id), "the run that the event asks for")
    run = runs[0]
    assert len(runs) <= len(arrived)
    assert run.parameters["if_new_data"] is True
    assert run.parameters["job"] == nightly.parameters["job"]


@contextmanager
def serving(folder: Path, server: str, ended_by: signal.Signals) -> Iterator[None]:
    """Serve the job in `folder`, as a person does in a shell, until the block ends."""
    environment = {
        **os.environ,
        "PREFECT_API_URL": server,
        "PREFECT_HOME": str(folder / "home"),
        "PREFECT_RUNNER_POLL_FREQUENCY": "1",
    }
    command = ["serve", str(folder / "job.yaml"), "--name", "served"]
    served = Command(command, environment, folder / f"serve-{time.time_ns()}.txt")
    wait_for(lambda: "serving: train/served" in served.output, "the deployment to be served", 300)
    yield
    os.killpg(served.process.pid, ended_by)  # Ctrl-C reaches everybody in a terminal
    assert served.code(300) == 0, served.output


def test_a_run_is_stopped_with_who_serves_it_and_resumes(
    make_job: Make,
    server: str,
    undisturbed_alone: dict[str, bytes],
    alive: Callable[[], list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lingers, mark = tmp_path / "lingers", tmp_path / "mark"
    lingers.touch()
    job = make_job(processes=1, lingers=str(lingers))
    with serving(tmp_path, server, signal.SIGINT):
        run = run_of("train/served")
        wait_for(mark.exists, "the run to train", 300)
    assert not alive()
    assert ended(run).state_name == "Crashed"
    [attempt] = AttemptLog(Store.open(job.run_url(str(run.id)))).attempts()
    assert attempt.outcome == "stopped"
    assert attempt.snapshot is not None
    assert attempt.snapshot.startswith(f"{attempt.step:012d}"), "the last snapshot is of the last step"
    lingers.unlink()
    with serving(tmp_path, server, signal.SIGTERM):
        monkeypatch.setattr(sys, "argv", ["prefect", "flow-run", "retry", str(run.id)])
        with pytest.raises(SystemExit, match=r"^0$"):
            prefect()
        assert ended(run).state_name == "Completed"
        wait_for(lambda: len(alive()) == 1, "the run's process to end")
    assert results(job, str(run.id)) == undisturbed_alone
