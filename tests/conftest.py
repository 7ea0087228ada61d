"""What holds for every test: one thread, repeatable, in a folder of its own, and nothing left behind."""

import gc
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from support.limit import LIMIT_S

# Before torch or numpy are imported, here and in every process that a test starts.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
# No telemetry from a test.
os.environ.update(PREFECT_SERVER_ANALYTICS_ENABLED="false", DO_NOT_TRACK="1")
#: a process without it was not started by this run of the tests
TOKEN = os.environ["MIDSTRIDE_TESTS"] = uuid.uuid4().hex

import hypothesis
import pytest
import support.lean_torchmetrics  # noqa: F401
from support.durations import Durations
from support.leaks import LASTING_PROCESSES, Surroundings
from support.run_folders import DISK, MEMORY, has_room_in_memory, make_run_folder
from support.seaweed import Seaweed

if "PYTEST_XDIST_WORKER" in os.environ:
    # What is left behind here must not look like a neighbour's.
    os.setpgid(0, 0)
# A shell's background job ignores Ctrl-C, and so would all that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")

# What is imported before the tests run stays: collecting it would take seconds, again and again.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--laws",
        choices=["cover", "all"],
        default="cover",
        help="walk a cover of the laws' axes in which every two values meet, or their whole product",
    )
    parser.addoption("--disk", action="store_true", help="keep every run folder on a disk, none in memory")
    parser.addoption("--durations-file", metavar="FILE", help="write what folders, files and tests took")
    parser.addoption("--ui", action="store_true", help="press buttons in a real browser, too; minutes")
    parser.addoption("--pictures", metavar="FOLDER", help="keep what the browser shows, as docs/images does")


#: each takes up to 2 GB with the worlds it starts
MOST_WORKERS = 6
#: tests of these files start programs, or read pages
SLOW_UNITS = {
    *("test_app.py", "test_audit.py", "test_build.py", "test_digits.py", "test_docs.py", "test_formats.py"),
    *("test_packaging.py", "test_portability.py", "test_resume_check.py", "test_runs.py"),
}
#: folders in the order in which they are dealt: what takes longest first, flows last (see `support.scheduling`)
ORDER = ("laws", "faults", "distributed", "unit", "flows")
#: tests that press buttons
UI = Path(__file__).parent / "ui"
#: where this run of the tests keeps its files
RUN_FOLDER = pytest.StashKey[Path]()
#: where those of all its workers meet
SHARED_FOLDER = pytest.StashKey[Path]()


@pytest.hookimpl(tryfirst=True)  # before pytest chooses a folder
def pytest_configure(config: pytest.Config) -> None:
    """Keep the files of tests, and temporary files of all they start, in memory where there is room."""
    # Gloo's thread spins while the one that has its lock is off the processor: a thread that is woken does not push
    # another one off here, nor in what tests start, which saves a tenth of what tests of ranks take.
    with suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    on_disk = config.getoption("--disk") or not has_room_in_memory()
    folder = config.stash[RUN_FOLDER] = make_run_folder(DISK if on_disk else MEMORY)
    if hasattr(config, "workerinput") or not config.option.basetemp:
        config.option.basetemp = str(folder / "t")
    config.stash[SHARED_FOLDER] = Path(getattr(config, "workerinput", {}).get("folder", folder))
    config.option.loadscopereorder = False  # files in our order, not those of most tests first
    (folder / "tmp").mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
    os.environ["XDG_STATE_HOME"] = str(folder / "state")  # with the secrets of runs on several machines
    if durations_file := config.getoption("--durations-file"):
        config.pluginmanager.register(Durations(config.invocation_params.dir / durations_file))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker where it meets the others."""
    node.workerinput["folder"] = str(node.config.stash[RUN_FOLDER])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """One more than there are cores, as tests wait for what they start to come and go, and one for the flows."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    return min(len(os.sched_getaffinity(0)) + 2, MOST_WORKERS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    from support.scheduling import Scheduling

    return Scheduling(config, log)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Leave only what failed tests wrote, and that until the next run."""
    if exitstatus != pytest.ExitCode.TESTS_FAILED:
        # After multiprocessing has removed its own folder there, which it does with priority -100.
        Finalize(None, shutil.rmtree, (session.config.stash[RUN_FOLDER], True), exitpriority=-200)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what needs a browser, unless it is asked for."""
    return True if collection_path == UI and not config.getoption("--ui") else None


@pytest.hookimpl(tryfirst=True)  # before pytest looks for what `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort by folders, and mark what is fast."""
    folders = {item: item.path.relative_to(config.rootpath).parts for item in items}
    items.sort(key=lambda item: _folder_number(folders[item]))
    for item in items:
        if "unit" in folders[item] and item.path.name not in SLOW_UNITS and "s3" not in f"{item.nodeid} {_uses(item)}":
            item.add_marker("fast")


def pytest_collection_finish() -> None:
    """Collect garbage from here on."""
    gc.freeze()
    gc.enable()


def _folder_number(folders: tuple[str, ...]) -> int:
    return next((number for number, folder in enumerate(ORDER) if folder in folders[:2]), 0)


def _uses(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])


#: what ranks of tests, and the worlds they stand in, would import one by one; what is not installed is left out
IN_RANKS = (
    "horovod.torch",
    "midstride.engine.jobs.operations",
    "midstride.engine.launch.rank",
    "midstride.engine.launch.spawn_agent",
    "midstride.engine.launch.torchrun_agent",
    "midstride.engine.strategies.pipeline.strategy",
    "pytest",
    "support.lean_torchmetrics",
    "torch.distributed.run",
    "torch.profiler._cupti_monitor",
    "torchmetrics",
)


def _nothing() -> None:
    pass


@pytest.fixture(scope="session", autouse=True)
def _warm(request: pytest.FixtureRequest) -> None:
    """Start the process that ranks are forked from before any test counts processes."""
    forking = {
        "laws",
        "distributed",
        "faults",
        "flows",
        "test_per_sample.py",
        "test_app.py",
        "test_bad_samples.py",
        "test_build.py",
        "test_child_processes.py",
        "test_data_check.py",
        "test_digits.py",
        "test_docs.py",
        "test_examples.py",
        "test_formats.py",
        "test_portability.py",
        "test_runs.py",
        "test_s3.py",
        "test_script.py",
        "test_stages.py",
        "test_state_entries.py",
        "test_step_replay.py",
    }
    if any(forking & set(item.path.parts) for item in request.session.items):
        import torch

        from midstride.engine.testing.ranks import PRELOAD, run_ranks

        torch.set_num_threads(1)
        folders = {part for item in request.session.items for part in item.path.parts}
        # The faults' ranks write to S3; what the laws train, each rank would import for itself.
        more = ["s3fs"] if "faults" in folders else []
        more += ["laws.strategies", "laws.streams"] if folders & {"laws", "faults", "distributed"} else []
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)  # where `support` is
            run_ranks(_nothing, timeout_s=LIMIT_S, preload=(*PRELOAD, *IN_RANKS, *more, "support.huge_pages"))


@pytest.fixture
def forked_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what this process launches forked from there, not started as fresh Pythons: a tenth of the time."""
    from support import fork_server

    monkeypatch.setattr("midstride.engine.processes.supervised_process.start_supervisor", fork_server.start_supervisor)
    monkeypatch.setattr("midstride.engine.launch.job_fork_server.forking", lambda *_: nullcontext())


@pytest.fixture(scope="session")
def shared_folder(pytestconfig: pytest.Config) -> Path:
    """The folder that all workers of this run of the tests see."""
    return pytestconfig.stash[SHARED_FOLDER]


@pytest.fixture(scope="session")
def lasting() -> set[int]:
    """Process ids that no test is blamed for; a fixture that starts one adds it, and ends it with the session."""
    return LASTING_PROCESSES


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """The S3 server that all tests share, who leave it as it is; `own_s3` is for harming."""
    server = Seaweed(tmp_path_factory.mktemp("s3"))
    LASTING_PROCESSES.add(server.pid)
    yield server
    server.kill()


@pytest.fixture
def bucket(s3: Seaweed) -> Iterator[str]:
    """The URL of a fresh bucket, which this process and those it starts can reach."""
    with s3.reached():
        yield s3.bucket()


@pytest.fixture(scope="session")
def _harmed_s3() -> Iterator[list[Seaweed]]:
    servers: list[Seaweed] = []
    yield servers
    for server in servers:
        server.kill()


@pytest.fixture
def own_s3(_harmed_s3: list[Seaweed], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """An S3 server that this test may kill and freeze; if it is up afterwards, the next test gets it."""
    if not _harmed_s3:
        _harmed_s3.append(Seaweed(tmp_path_factory.mktemp("own-s3")))
    server = _harmed_s3[0]
    with server.reached():
        yield server
    server.thaw()
    if server.is_up:
        LASTING_PROCESSES.add(server.pid)
    else:
        _harmed_s3.clear()


@pytest.fixture(scope="session")
def _disk() -> Iterator[Path]:
    folder = make_run_folder(DISK)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def tmp_path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder of this test alone: in memory, where there is room, unless the test is marked `disk`."""
    if request.node.get_closest_marker("disk") is None:
        return tmp_path
    return Path(tempfile.mkdtemp(dir=request.getfixturevalue("_disk")))


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep relative paths out of the checkout, whose bare folder names must not be importable."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _nothing_left_behind(_own_folder: None) -> Iterator[None]:
    """Fail a test that leaks an environment variable, a thread, a process or a process group."""
    surroundings = Surroundings(f"MIDSTRIDE_TESTS={TOKEN}")
    yield
    leaks = surroundings.leaks()
    assert not leaks, "left behind: " + "; ".join(leaks)
