"""Trainings in a flow of one's own: several in one process, stopped, retried, cancelled, within limits."""

import os
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prefect import Flow, flow, get_client, task
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.exceptions import Pause
from prefect.states import Cancelling, Scheduled, Suspended
from support.flow_runs import results, tiny_job, wait_for
from support.limit import LIMIT_S
from support.pages import ROOT, blocks
from support.prefect_worker import Worker, ended, run_of
from support.tiers import everything

from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import JobError
from midstride.engine.launch.watchdog import DUMP_STACKS
from midstride.engine.processes.lifetime import processes_with_env
from midstride.engine.runs.run import Run
from midstride.flows import train
from midstride.flows.deployment import deploy
from midstride.flows.server_setup import create_pool
from midstride.tasks import launch_world, monitor, prepare_data, publish_report, slots
from midstride.tasks.monitor import RunMonitor

Make = Callable[..., TrainingJob]


@pytest.fixture(scope="module")
def worker(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Return a worker with a pool of its own: other processes of tests have others."""
    create_pool(pool := f"own-{uuid4()}")
    worker = Worker(tmp_path_factory.mktemp("worker"), server, pool)
    yield worker
    worker.stop()


#: the page whose flows run here
PAGE = ROOT / "docs/your-own-flow.md"


class House:
    """A folder with the flows of `own_flow.py` and of the page, and several equal jobs, which wait at step 8."""

    def __init__(self, folder: Path, names: str) -> None:
        self.folder = folder
        shutil.copy(Path(__file__).with_name("own_flow.py"), folder)
        for file, text in blocks(PAGE, "python"):
            (folder / file).write_text(text)
        self.jobs = [tiny_job(folder / name, processes=1, wait_at=8) for name in names]

    def deploy(self, name: str, pool: str, file: str = "own_flow.py") -> str:
        """Deploy the flow called `name`; return the name of the deployment."""
        own: Any = Flow.from_source(str(self.folder), f"{file}:{name}")
        own.deploy(deployment := str(uuid4()), work_pool_name=pool, print_next_steps=False)
        return f"{name}/{deployment}"

    def wait_until_trained(self, run: FlowRun, worker: Worker) -> None:
        """Wait until each training of `run` is at step 8."""
        with get_client(sync_client=True) as client:

            def trained() -> bool:
                now = client.read_flow_run(run.id)
                assert now.state is None or not now.state.is_final(), now.state
                return all(Path(job.folder, "mark").exists() for job in self.jobs)

            try:
                wait_for(trained, "the step at which the model waits")
            except AssertionError:
                self._show(run, worker)
                raise

    def _show(self, run: FlowRun, worker: Worker) -> None:
        """Print where `run` is: its states, its files, the stacks of its process."""
        for one in (run, *children(run)):
            print(one.name, one.state)
        print(*(path.relative_to(self.folder) for path in self.folder.rglob("*")), sep="\n")
        for pid in processes_with_env("PREFECT__FLOW_RUN_ID", str(run.id)):
            print(pid, Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
        with suppress(ValueError):  # it has ended
            os.kill(flow_process(run), DUMP_STACKS)
            time.sleep(5)
        print(worker.log.read_text()[-40_000:])

    def runs(self) -> list[Run]:
        """Return the run of each job: each has one."""
        found = []
        for job in self.jobs:
            [name] = [path.name for path in Path(job.store_url).iterdir()]
            found.append(Run(job, name))
        return found


def children(of: FlowRun) -> list[FlowRun]:
    with get_client(sync_client=True) as client:
        parent = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[of.id]))
        return client.read_flow_runs(flow_run_filter=parent)


def flow_process(run: FlowRun) -> int:
    """Return the process of a flow run: the worker starts it, and it starts the worlds."""
    worlds = set(processes_with_env("PREFECT__FLOW_RUN_ID", str(run.id)))
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0") for pid in worlds}
    [found] = [pid for pid, words in commands.items() if "prefect.engine" in words or "prefect.flow_engine" in words]
    return found


def signalled(number: signal.Signals) -> Callable[[FlowRun], None]:
    return lambda run: os.kill(flow_process(run), number)


def set_state(state: Any) -> Callable[[FlowRun], None]:
    def ask(run: FlowRun) -> None:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(run.id, state(), force=True)

    return ask


def resume(run: FlowRun) -> None:
    with get_client(sync_client=True) as client:
        client.resume_flow_run(run.id)


retry = set_state(lambda: Scheduled(name="AwaitingRetry"))
cancel = set_state(Cancelling)
pause = set_state(lambda: Suspended(timeout_seconds=int(LIMIT_S)))
SIGTERM, SIGINT = signalled(signal.SIGTERM), signalled(signal.SIGINT)

#: how trainings run side by side, how they are stopped; the flow's state then, that of its subflows; what resumes it
STOPS: dict[str, tuple[str, Any, str, set[str], Any]] = {
    "submit, SIGTERM": ("submitted", SIGTERM, "Crashed", {"Crashed"}, retry),
    "submit, Cancel": ("submitted", cancel, "Cancelled", {"Cancelled"}, retry),
    "submit, Pause": ("submitted", pause, "Suspended", {"Cancelled"}, resume),
    "map of tasks, SIGINT": ("mapped", SIGINT, "Crashed", set(), retry),
    "threads, Cancel": ("threaded", cancel, "Cancelled", {"Cancelled"}, retry),
    "asyncio, SIGTERM": ("awaited", SIGTERM, "Crashed", {"Crashed"}, retry),
}


#: without which each way and each stop is still there
MORE = {"submit, SIGTERM", "submit, Cancel"}


@pytest.mark.parametrize("way", [pytest.param(way, marks=everything if way in MORE else ()) for way in STOPS])
def test_a_stop_reaches_each_training_and_a_retry_resumes_it(
    way: str, worker: Worker, undisturbed_alone: dict[str, bytes], tmp_path: Path
) -> None:
    name, stop, state, of_children, resume_by = STOPS[way]
    house = House(tmp_path, "ab")
    run = run_of(house.deploy(name, worker.pool))
    house.wait_until_trained(run, worker)
    stop(run)
    stopped = state_name(run, state)
    worker.wait_until_idle()
    assert {child.state_name for child in children(stopped)} == of_children
    for own in house.runs():
        assert [attempt.outcome for attempt in own.attempts.attempts()] == ["stopped"]
        assert own.catalog.snapshots()[-1].position.step >= 8, "the last snapshot, and not the one of step 5"
    resume_by(run)
    assert ended(run).state_name == "Completed"
    for own in house.runs():
        [_, attempt] = own.attempts.attempts()
        assert (attempt.outcome, attempt.resumed_step) == ("done", own.attempts.attempts()[0].step)
        assert results(own.job, own.name) == undisturbed_alone


def state_name(run: FlowRun, name: str) -> FlowRun:
    """Wait until a flow run has a state of that name."""
    with get_client(sync_client=True) as client:

        def there() -> FlowRun | None:
            now = client.read_flow_run(run.id)
            assert now.state is not None
            assert now.state_name == name or not now.state.is_final(), now.state
            return now if now.state_name == name else None

        return wait_for(there, name)  # type: ignore[no-any-return]


def test_children_end_with_their_parent_and_resume_with_it(
    worker: Worker, undisturbed_alone: dict[str, bytes], tmp_path: Path
) -> None:
    house, names = House(tmp_path, "ab"), [str(uuid4()) for _ in range(2)]
    for job, name in zip(house.jobs, names, strict=True):
        deploy(job, name, pool=worker.pool)
    parent = house.deploy("elsewhere", worker.pool, "elsewhere.py")
    run = run_of(parent, deployments=[f"train/{name}" for name in names])
    house.wait_until_trained(run, worker)
    cancel(run)
    state_name(run, "Cancelled")
    wait_for(lambda: [child.state_name for child in children(run)] == ["Cancelled"] * 2, "the ends of its children")
    worker.wait_until_idle()
    for own in house.runs():
        assert own.catalog.snapshots()[-1].position.step >= 8
    retry(run)
    assert ended(run).state_name == "Completed"
    for own in house.runs():
        assert [attempt.outcome for attempt in own.attempts.attempts()] == ["stopped", "done"]
        assert results(own.job, own.name) == undisturbed_alone


#: file of the page -> its flow, how many runs it makes
ON_PAGE = {"pipeline.py": ("pipeline", 1), "subflow.py": ("pipeline", 1), "seeds.py": ("seeds", 3)}


@pytest.mark.parametrize("file", ON_PAGE)
def test_flows_of_the_page_run(file: str, make_job: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(processes=1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / file).write_text(dict(blocks(PAGE, "python"))[file])
    name, count = ON_PAGE[file]
    runpy.run_path(file)[name]()
    runs = [Run(job, path.name) for path in Path(job.store_url).iterdir() if path.name != "_champions"]
    assert [run.attempts.attempts()[-1].outcome for run in runs] == ["done"] * count
    assert all((Path(run.url) / "report.md").exists() for run in runs)


def test_a_worker_is_killed_with_three_trainings_under_it(
    server: str, undisturbed_alone: dict[str, bytes], tmp_path: Path
) -> None:
    create_pool("doomed")
    (tmp_path / "worker").mkdir()
    worker, house = Worker(tmp_path / "worker", server, "doomed"), House(tmp_path, "abc")
    run = run_of(house.deploy("submitted", "doomed"))
    house.wait_until_trained(run, worker)
    worker.process.kill()
    worker.process.wait()
    for job in house.jobs:
        Path(job.folder, "mark-over").touch()
    assert ended(run).state_name == "Completed"
    for own in house.runs():
        assert len(own.attempts.attempts()) == 1
        assert results(own.job, own.name) == undisturbed_alone


def test_a_later_task_that_fails_trains_nothing_again(make_job: Make, tmp_path: Path) -> None:
    tried: list[str] = []

    @task
    def serve(run: str) -> str:
        tried.append(run)
        if len(tried) == 1:
            raise RuntimeError("the place to serve from is down")
        return run

    @flow(retries=1)
    def features_to_serving() -> str:
        job = tmp_path / "job.yaml"
        prepare_data(job)
        assert launch_world(job) == 24
        return serve(publish_report(job).run)

    job = make_job(processes=1)
    name = features_to_serving()
    assert tried == [name, name]
    assert [attempt.outcome for attempt in Run(job, name).attempts.attempts()] == ["done"]
    assert (tmp_path / "data.prepared").read_text() == "xx", "by its task, and by the training"


def test_a_subflow_has_one_run_in_all_tries_of_its_parent(make_job: Make) -> None:
    names: list[str] = []

    @flow(retries=1)
    def parent() -> None:
        names.append(train(job).run)
        names.append(train(job.model_copy(update={"seed": 4})).run)
        if len(names) == 2:
            raise RuntimeError("once")

    job = make_job(processes=1)
    parent()
    assert names[:2] == names[2:]
    assert names[0] != names[1], "other settings, another run"
    assert len(list(Path(job.store_url).iterdir())) == 2


def test_one_run_is_not_trained_twice_at_once(make_job: Make) -> None:
    job = make_job(processes=1, wait_at=3)

    @flow
    def both() -> list[Any]:
        first = launch_world.submit(job, "same")
        wait_for(Path(job.folder, "mark").exists, "the first to train")
        second = launch_world.submit(job, "same")
        second.wait()
        Path(job.folder, "mark-over").touch()
        return [first.result(), second.state.result(raise_on_failure=False)]

    last_step, refused = both()
    assert last_step == 24
    assert isinstance(refused, JobError)
    assert "trains run same already" in str(refused)


def test_a_pause_that_a_snapshot_meets_first_is_recorded(make_job: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect raises `Pause`, which is no `Exception`, where the next task starts."""
    record, paused = RunMonitor._record, list[None]()

    def pause(this: RunMonitor) -> None:
        context = FlowRunContext.get()
        assert context is not None
        context.flow_run_suspension_request.mark_requested(Suspended(timeout_seconds=int(LIMIT_S)))
        paused.append(None)
        record(this)

    monkeypatch.setattr(monitor, "SNAPSHOTS_EVERY_S", 0.0)
    monkeypatch.setattr(RunMonitor, "_record", pause)
    job = make_job(processes=1, wait_at=8)
    with pytest.raises(Pause):
        flow(launch_world.fn, name="paused")(job, "paused")
    assert paused
    assert [attempt.outcome for attempt in Run(job, "paused").attempts.attempts()] == ["stopped"]


HOLDER = """
import sys
from midstride.tasks import launch_world, slots
from prefect import flow
slots.RENEWED_EVERY_S = 1
flow(launch_world.fn, name="holder")(sys.argv[1], "holder")
"""


def test_slots_of_a_dead_holder_are_given_back(
    make_job: Make, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with get_client(sync_client=True) as client:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name="gpus", limit=3))
    monkeypatch.setattr(slots, "ASKED_EVERY_S", 0.5)
    monkeypatch.setattr(slots, "RENEWED_EVERY_S", 1.0)
    job = make_job(processes=1, wait_at=3).model_copy(update={"resources": {"gpus": 2}})
    (tmp_path / "holder.json").write_text(job.model_dump_json())  # which is YAML, too
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "holder.json")]
    with subprocess.Popen(command, env={**os.environ, "PREFECT_API_URL": server}) as holder:
        try:
            wait_for((tmp_path / "mark").exists, "the holder to train")
            asked = list[None]()

            def while_it_waits() -> None:
                asked.append(None)
                holder.kill()

            monkeypatch.setattr(slots, "stop_if_asked", while_it_waits)
            assert flow(launch_world.fn, name="waits")(job, "second") == 24
            assert asked, "it waited for slots"
            assert holder.wait() == -signal.SIGKILL
        finally:
            holder.kill()
    with get_client(sync_client=True) as client:
        assert client.read_global_concurrency_limit_by_name("gpus").active_slots == 0


def test_slots_are_kept_while_their_holder_lives(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    renewed = threading.Event()
    answer = SyncPrefectClient.renew_concurrency_lease

    def renew(client: SyncPrefectClient, *arguments: Any) -> None:
        answer(client, *arguments)
        renewed.set()

    monkeypatch.setattr(SyncPrefectClient, "renew_concurrency_lease", renew)
    monkeypatch.setattr(slots, "RENEWED_EVERY_S", 0.1)
    with get_client(sync_client=True) as client:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name="kept", limit=1))
    with slots.claimed("kept", 1):
        assert renewed.wait(LIMIT_S)


#: name of the limit, its size (None if there is none), the message to a job that asks for five slots of it
IMPOSSIBLE = {"tpus": (None, "gcl create tpus"), "few": (4, "the limit is 4")}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_slots_that_can_never_be_had_are_refused(make_job: Make, server: str, name: str) -> None:
    limit, said = IMPOSSIBLE[name]
    if limit is not None:
        with get_client(sync_client=True) as client:
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=limit))
    job = make_job(processes=1).model_copy(update={"resources": {name: 5}})
    with pytest.raises(JobError, match=said):
        train(job, "greedy")


def test_forms_of_a_job_are_alike(make_job: Make, tmp_path: Path) -> None:
    job = make_job(processes=1)
    for form in (job, tmp_path / "job.yaml", str(tmp_path / "job.yaml"), job.model_dump(mode="json")):
        assert train(form, "same").outcome == "done"
    assert len(Run(job, "same").attempts.attempts()) == 1
