"""`midstride join`: machines that go and come change no bit of a run in lanes.

Nodes are processes on the loopback. Where root may make network namespaces, they are machines of their own as well.
"""

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from signal import SIGUSR1
from socket import gethostname
from typing import Any

import pytest
from support.flow_runs import results, tiny_job, wait_for
from support.machines import Machines, undisturbed
from support.networks import Network, why_no_network
from support.node_strikes import CABLED, RESTARTED, STRIKES, Strike, killed, rank_suspended

from midstride.engine.config.job import TrainingJob
from midstride.engine.runs.audit import audit
from midstride.engine.runs.run import Run
from midstride.engine.runs.run_report import report_of

#: enough to be in the middle of, at two seconds a step, until other nodes have come
STEPS = 64


#: more than a step takes here on a busy machine
HANG_S = 20


@pytest.fixture
def machines(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Machines]:
    """Return machines that end with the test."""
    strike = request.node.callspec.params.get("strike")
    if strike not in CABLED:
        found = Machines(tmp_path)
        yield found
        found.close()
        return
    if why := why_no_network():
        pytest.skip(why)
    with Network(MOST + 2) as network:
        found = Machines(tmp_path, network)
        yield found
        found.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    whole = metafunc.config.getoption("--laws") == "all"
    if "strike" in metafunc.fixturenames:
        cells = [*product(STRIKES, WORLDS)] if whole else [(killed, "2 lanes")]
        metafunc.parametrize(("strike", "world"), cells, ids=[f"{strike.__name__}-{world}" for strike, world in cells])
    if "scene" in metafunc.fixturenames:
        scenes = SCENES if whole else ("missing code", "an error of the job")
        metafunc.parametrize("scene", scenes)


#: what is chosen for the world; without lanes its bits follow from how many ranks there are
WORLDS: dict[str, dict[str, Any]] = {
    "2 lanes": {"nodes": "1:2", "lanes": 2},
    "4 lanes on 4 nodes": {"nodes": "1:4", "lanes": 4},
    "4 lanes on 2 nodes": {"nodes": "1:2", "processes": 2, "lanes": 4},
    "a global batch": {"nodes": "1:2", "lanes": None, "global_batch_size": 8},
    "ddp": {"nodes": "2", "processes": 2, "lanes": None},
    "sharded": {"nodes": "2", "processes": 2, "lanes": None, "strategy": "sharded"},
}
#: nodes at most, and one that replaces another
MOST = 5


def test_what_happens_to_nodes_changes_no_bit(strike: Strike, world: str, tmp_path: Path, machines: Machines) -> None:
    chosen = WORLDS[world]
    job = lingering(machines, **chosen, hang_timeout_s=HANG_S if strike is rank_suspended else None)
    for _ in range(machines.most):
        machines.join()
    machines.wait_for_all()
    before = machines.rounds
    lingers(machines)
    strike(machines)
    if machines.is_fixed and len(machines.nodes) < machines.most:
        machines.join()
        machines.wait_for_all()
    go_on(machines)
    assert audit(job.run_url("a")).is_clean
    assert world == "a global batch" or results(job, "a") == undisturbed(tmp_path / "undisturbed", STEPS, **chosen)
    seen = slice(-1, None) if strike in RESTARTED else slice(before - 1, None)
    rounds = report_of(Run(job, "a")).rounds[seen]
    sizes, causes = expected(strike, machines)
    assert [one.ranks for one in rounds] == sizes
    for one, why in zip(rounds[1:], causes, strict=True):
        assert why in one.why
        assert one.resumed_from is not None
    assert [attempt.outcome for attempt in Run(job, "a").attempts.attempts()][-1] == "done"


def expected(strike: Strike, machines: Machines) -> tuple[list[int], list[str]]:
    """Return how many ranks each round has, and why; a world that is fixed has none with fewer."""
    are_all, causes = STRIKES[strike]
    if machines.is_fixed:
        are_all, causes = [True] * min(2, len(are_all)), causes[:1]
    ranks = machines.most * machines.processes
    return [ranks if all_train else ranks // 2 for all_train in are_all], causes


def lingering(machines: Machines, **chosen: object) -> TrainingJob:
    """Start the launcher of a job that takes two seconds for a step behind the first snapshot, until `go_on`."""
    slow = machines.folder / "slow"
    job = tiny_job(machines.folder, steps=STEPS, lingers=str(slow))
    slow.touch()
    machines.fit(**chosen)
    return job


def lingers(machines: Machines) -> None:
    """Wait until the round that trains has done a step; an earlier one may have left its mark."""
    mark = machines.folder / "mark"
    mark.unlink(missing_ok=True)

    def step() -> int:
        return int((mark.exists() and mark.read_text()) or 0)

    first = wait_for(step, "a step behind a snapshot")
    wait_for(lambda: step() > first, "the step after it")


def go_on(machines: Machines) -> None:
    (machines.folder / "slow").unlink()
    assert machines.launcher.wait() == 0, machines.said()
    assert [node.wait() for node in machines.nodes] == [0] * len(machines.nodes), machines.said()


def has_a_spare(machines: Machines) -> None:
    """It takes the place of one of the two that train."""
    job = lingering(machines, nodes="2:3")
    for _ in range(3):
        machines.join()
    machines.wait_for_round(ranks=2)
    lingers(machines)
    trains = next(node for node in machines.nodes if node.find("machines.rank"))
    machines.nodes.remove(trains)
    trains.kill()
    machines.wait_for_round(ranks=2)
    go_on(machines)
    assert results(job, "a") == undisturbed(machines.folder / "undisturbed", STEPS)
    assert audit(job.run_url("a")).is_clean


def takes_a_snapshot(machines: Machines) -> None:
    catalog = Run(lingering(machines), "a").catalog
    machines.join()
    machines.join()

    def asked() -> list[int]:
        machines.launcher.find("engine fit")[0].signal(SIGUSR1)
        return [one.position.step for one in catalog.snapshots() if one.position.step % 5]

    lingers(machines)
    wait_for(asked, "a snapshot between those of the schedule")
    go_on(machines)


def dies_again_and_again(machines: Machines) -> None:
    job = tiny_job(machines.folder, dies_at=3)
    machines.fit(nodes=1, lanes=None)
    machines.join()
    assert machines.launcher.wait() == 1, machines.said()
    [attempt] = Run(job, "a").attempts.attempts()
    assert (attempt.outcome, len(attempt.rounds)) == ("died", 4)
    assert "ended without a word" in attempt.error
    words = "has ended 2 of the last 10 rounds: it waits while others are enough"
    assert words in attempt.rounds[2]["why"], "and there are none"


def hangs(machines: Machines) -> None:
    """One of its ranks in a training step; the stack of every rank is in the log, of which node it is as well."""
    job, host = tiny_job(machines.folder, steps=STEPS, wait_at=9), gethostname()
    machines.fit(nodes=2, hang_timeout_s=HANG_S)
    machines.join()
    machines.join()
    assert machines.launcher.wait() == 0, machines.said()
    assert [node.wait() for node in machines.nodes] == [0, 0], machines.said()
    assert results(job, "a") == undisturbed(machines.folder / "undisturbed", STEPS)
    [attempt] = Run(job, "a").attempts.attempts()
    assert f"wait for rank 0 on node {host}: still reading a batch, or in the training step" in attempt.rounds[1]["why"]
    log = Run(job, "a").store.read("attempts/000001.log").decode()
    for rank in (0, 1):
        own = log.partition(f"{host}: --- rank {rank}, process")[2].partition("--- rank")[0]
        assert ("_wait_once" in own) == (rank == 0)
        assert "training_step" in own or "in run" in own, f"rank {rank} has no stack"


def is_refused(machines: Machines, join: Callable[[Path], object], words: str) -> None:
    """Before the first step; the job is at fault."""
    outside = machines.folder
    machines.folder = outside / "here"
    job = tiny_job(machines.folder)
    machines.fit(nodes=2)
    join(outside)
    assert machines.launcher.wait() == 2, machines.said()
    assert words.format(here=machines.folder, host=gethostname()) in machines.said("fit.txt")
    [attempt] = Run(job, "a").attempts.attempts()
    assert (attempt.outcome, attempt.rounds) == ("user_error", ())


def without_code(machines: Machines) -> None:
    words = "node {host} has no folder {here}: the job's code must be at the same path on every node"
    is_refused(machines, lambda outside: machines.join(hides=outside), words)


def without_store(machines: Machines) -> None:
    words = "node {host} does not see the launcher's files in {here}/runs/a: use a folder that all nodes share"
    is_refused(machines, lambda outside: machines.join(hides=outside / "here" / "runs"), words)


def with_other_threads(machines: Machines) -> None:
    words = "node {host} computes sums differently from node {host}: OMP_NUM_THREADS '"
    is_refused(machines, lambda _: [machines.join(OMP_NUM_THREADS=threads) for threads in "13"], words)


def is_refused_late(machines: Machines) -> None:
    job = lingering(machines)
    machines.join()
    machines.wait_for_round(ranks=1)
    assert machines.join(OMP_NUM_THREADS="3").wait() == 2, machines.said()
    machines.nodes.pop()
    go_on(machines)
    [attempt] = Run(job, "a").attempts.attempts()
    assert [one["ranks"] for one in attempt.rounds] == [1]


def leaves_a_folder(machines: Machines) -> None:
    """That of a node that was killed is removed by the next."""
    folder, there = machines.folder, {"TMPDIR": str(machines.folder)}
    tiny_job(folder)
    machines.fit(nodes=2)
    killed = machines.join(**there)
    [before] = wait_for(lambda: [*folder.glob("midstride-node-*/job.json")], "a node's folder")
    killed.kill()
    machines.nodes.remove(killed)
    machines.join(**there)
    wait_for(lambda: not before.exists(), "it to be gone")
    machines.join(**there)
    assert machines.launcher.wait() == 0, machines.said()
    assert [node.wait() for node in machines.nodes] == [0, 0], machines.said()
    assert not [*folder.glob("midstride-node-*")]


def has_an_error(machines: Machines) -> None:
    job = tiny_job(machines.folder, fail_at=2)
    machines.fit(nodes="1", lanes=None)
    machines.join()
    assert machines.launcher.wait() == 2, machines.said()
    assert machines.nodes[0].wait() == 2, machines.said()
    assert "the model is not in the mood" in machines.said("fit.txt")
    [attempt] = Run(job, "a").attempts.attempts()
    assert (attempt.outcome, len(attempt.rounds)) == ("user_error", 1)


#: what happens to nodes otherwise; the first two need mounts of a machine's own
SCENES: dict[str, Callable[[Machines], None]] = {
    "missing code": without_code,
    "missing store": without_store,
    "other threads": with_other_threads,
    "other threads, late": is_refused_late,
    "one spare": has_a_spare,
    "a snapshot": takes_a_snapshot,
    "no progress": dies_again_and_again,
    "a hang": hangs,
    "a folder": leaves_a_folder,
    "an error of the job": has_an_error,
}


def test_what_else_happens_to_nodes(scene: str, machines: Machines) -> None:
    if scene.startswith("missing") and (why := why_no_network()):
        pytest.skip(why)
    SCENES[scene](machines)
