"""One server and one worker for all tests of the UI."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from flow_runs import results, tiny_job
from ui.deaths import STEPS
from ui.site import Site

from midstride.engine.launch import launch


@pytest.fixture(scope="session")
def _site(tmp_path_factory: pytest.TempPathFactory, lasting: set[int]) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("site"), lasting).open() as site:
        yield site


@pytest.fixture
def site(_site: Site) -> Iterator[Site]:
    """A server, a worker and a deployment, all there; what a test that fails leaves of its runs is ended."""
    _site.start()
    yield _site
    _site.end_runs()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run leaves that nothing happened to: file -> bytes."""
    job = tiny_job(tmp_path_factory.mktemp("undisturbed"), processes=1, steps=STEPS)
    assert launch(job, "reference").kind == "done"
    return results(job, "reference")


@pytest.fixture
def pictures(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where pictures of the browser go: into this test's folder, or to `--pictures`."""
    chosen: str | None = request.config.getoption("--pictures")
    return Path(request.config.invocation_params.dir, chosen) if chosen else tmp_path
