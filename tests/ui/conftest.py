"""One server and one worker for all tests of the UI."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.flow_runs import results, tiny_job
from ui.deaths import STEPS
from ui.site import Site

from midstride.engine.launch.launch import launch
from midstride.engine.runs.run import Run

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "digits"


@pytest.fixture(scope="session")
def _site(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory, lasting: set[int]) -> Iterator[Site]:
    home, chosen = tmp_path_factory.mktemp("site"), pytestconfig.getoption("--pictures")
    pictures = Path(pytestconfig.invocation_params.dir, chosen) if chosen else home
    pictures.mkdir(parents=True, exist_ok=True)
    with Site(home, pictures, lasting).open(EXAMPLE / "job.yaml") as site:
        yield site


@pytest.fixture
def site(_site: Site) -> Iterator[Site]:
    """A server, a worker and a deployment, all there; what a test that fails leaves of its runs is ended."""
    _site.start()
    yield _site
    _site.end_runs()


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The example's job file, its code beside it."""
    for name in ("job.yaml", "model.py"):
        shutil.copy(EXAMPLE / name, tmp_path)
    return tmp_path / "job.yaml"


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run leaves that nothing happened to: file -> bytes."""
    job = tiny_job(tmp_path_factory.mktemp("undisturbed"), processes=1, steps=STEPS)
    assert launch(Run(job, "reference")).kind == "done"
    return results(job, "reference")
