"""`midstride train` over several machines, one of which is lost."""

import re
from pathlib import Path
from socket import gethostname

import pytest
from support.flow_events import payload, told
from support.flow_runs import STEPS, results, tiny_job, wait_for
from support.machines import Machines, undisturbed

from midstride.engine.runs.run import Run
from midstride.engine.runs.run_report import report_of


def test_a_lost_machine_starts_a_round_and_no_retry(server: str, tmp_path: Path) -> None:
    slow, host = tmp_path / "slow", gethostname()
    job = tiny_job(tmp_path, lingers=str(slow))
    slow.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_API_URL", server)
        machines = Machines(tmp_path, program=("midstride.flows", "train"))
        try:
            machines.fit()
            machines.join()
            machines.join()
            machines.wait_for_round(ranks=2)
            wait_for((tmp_path / "mark").exists, "a step behind a snapshot")
            machines.nodes.pop(0).kill()
            machines.wait_for_round(ranks=1)
            slow.unlink()
            assert machines.launcher.wait() == 0, machines.said()
            assert machines.nodes[0].wait() == 0, machines.said()
        finally:
            machines.close()
    assert results(job, "a") == undisturbed(tmp_path / "undisturbed", STEPS)
    [attempt] = Run(job, "a").attempts.attempts()
    assert attempt.outcome == "done"
    # A machine that is slow to join makes a round of its own first.
    ranks = [one.ranks for one in report_of(Run(job, "a")).rounds]
    assert ranks[-2:] == [2, 1]
    events = told(server, "midstride.run.a", "midstride.round.begun", least=len(ranks))
    *_, first, second = sorted((payload(event).model_dump() for event in events), key=lambda event: event["number"])
    assert (first["nodes"], second["nodes"]) == ([host, host], [host])
    assert re.fullmatch(rf"node {host} \(rank [01]\) was silent for 5 s: it is left out", second["why"])
