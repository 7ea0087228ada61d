"""Whatever befalls a deployed run, one thing after the other: it ends with the bits of a run that nothing befell."""

from itertools import pairwise
from pathlib import Path

import pytest
from support.flow_runs import results, tiny_job, wait_for
from ui.deaths import DEATHS, STEPS
from ui.site import Site

from midstride.engine.session.attempts import AttemptLog
from midstride.engine.storage.store import Store


@pytest.mark.timeout(3000)  # seven lives of a flow, each of several processes: four minutes where it is quiet
def test_a_run_of_many_deaths_has_undisturbed_bits(site: Site, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    lingers, mark = tmp_path / "lingers", tmp_path / "mark"
    lingers.touch()
    job = tiny_job(tmp_path, processes=1, steps=STEPS, retries_without_progress=0, lingers=str(lingers))
    run = site.run(job)
    for death in DEATHS:
        trains(mark)
        death.strike(site, run)
        if death.retry is not None:
            wait_for(lambda: not run.processes(), f"all that lived for the run to end: {death.what}", 300)
            # A cancelled flow says that it crashed; a moment later its worker knows better.
            wait_for(lambda: run.state == death.state, f"{death.state}: {death.what}", 400)  # noqa: B023 - called at once
            site.start()
            death.retry(site, run)
        site.start()
    trains(mark)
    lingers.unlink()
    run.reaches("Completed")
    assert results(job, run.id) == undisturbed
    assert run.tasks("prepare data") == ["Completed"] + ["Cached"] * sum(death.retry is not None for death in DEATHS)
    attempts = AttemptLog(Store.open(job.run_url(run.id))).attempts()
    for before, after in pairwise(attempts):
        assert after.resumed_from == (before.snapshot or before.resumed_from)
    cancelled = next(attempt for attempt in attempts if attempt.outcome == "stopped")
    assert cancelled.snapshot is not None
    assert cancelled.snapshot.startswith(f"{cancelled.step:012d}"), "the last snapshot is of the last step"


def trains(mark: Path) -> None:
    """Wait until the run is at a step that takes its time."""
    mark.unlink(missing_ok=True)
    wait_for(mark.exists, "the run to train", 300)
