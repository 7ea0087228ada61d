"""The attempt log: attempts are numbered once, and another one is made only when it makes sense."""

from pathlib import Path
from typing import Any

import pytest

from midstride.engine.errors import Superseded
from midstride.engine.runs.summary import summary_of
from midstride.engine.session.attempts import Attempt, AttemptLog, fatal_snapshots, retry_verdict
from midstride.engine.session.outcome import Kind, Outcome
from midstride.engine.storage.store import Store


def died(number: int, **facts: Any) -> Attempt:
    return Attempt(number, **{"outcome": "died", **facts})


def name_of(step: int, generation: int) -> str:
    return f"{step:012d}-g{generation:06d}"


def test_attempts_are_numbered_and_rewritten(tmp_path: Path) -> None:
    log = AttemptLog(Store.open(str(tmp_path)))
    first, second = log.begin(), log.begin()
    log.record(second, Outcome.of(RuntimeError("x"), rank=1, step=5))
    assert [(one.number, one.outcome) for one in log.attempts()] == [(1, "lost"), (2, "died")]
    last = log.attempts()[-1]
    assert (last.type, last.step, last.rank, last.code) == ("builtins.RuntimeError", 5, 1, 1)
    assert first.number == 1
    assert last.ended is not None


def test_another_world_may_take_a_number(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    log = AttemptLog(store)
    store.at("attempts").create("000001.json", b'{"number": 1, "from_a_later_version": 3}')
    assert log.begin().number == 2
    assert [one.number for one in log.attempts()] == [1, 2]


def test_what_others_put_beside_the_attempts_is_none(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    log = AttemptLog(store)
    log.begin()
    for name in ("notes.json", "000001 (copy).json", "000009.json.orig"):
        store.at("attempts").write(name, store.at("attempts").read("000001.json"))
    assert log.begin().number == 2
    assert [one.number for one in log.attempts()] == [1, 2]


def ended(number: int, outcome: Kind, **facts: Any) -> Attempt:
    return Attempt(number, outcome=outcome, **facts)


def failed(number: int, step: int = 7, type: str = "builtins.ValueError") -> Attempt:
    return died(number, type=type, step=step)


SUPERSEDED = Outcome.of(Superseded("x"))
FROM = {"resumed_from": name_of(20, 3)}
REFILLED = [died(1), died(2), died(3, snapshot=name_of(20, 3)), died(4, **FROM), died(5)]
#: errors of the engine, the second by the name that an earlier version wrote
OURS = ("midstride.engine.errors.SnapshotError", "midstride.engine.faults.InjectedFault")
#: case -> attempts, retries without progress, whether another attempt is made
RETRIED: dict[str, tuple[list[Attempt], int, bool]] = {
    "a user's error": ([ended(1, "user_error")], 3, False),
    "done": ([ended(1, "done")], 3, False),
    "superseded": ([ended(1, SUPERSEDED.kind, type=SUPERSEDED.type)], 3, False),
    "a stop": ([died(1), ended(2, "stopped")], 0, True),
    "a stop does not count": ([died(1), ended(2, "stopped"), died(3)], 2, True),
    "one too many beside a stop": ([died(1), ended(2, "stopped"), died(3)], 1, False),
    "no retries": ([died(1)], 0, False),
    **{f"{count} without progress": ([died(n + 1) for n in range(count)], 3, count < 4) for count in (1, 2, 3, 4)},
    "a lost attempt counts": ([Attempt(1), Attempt(2)], 1, False),
    "a newer snapshot refills": (REFILLED, 2, True),
    "the same step again does not": ([*REFILLED, died(6, **FROM, snapshot=name_of(20, 6))], 2, False),
    "a place further in it does": ([*REFILLED, died(6, **FROM, snapshot=f"{20:012d}.0003-g000006")], 2, True),
    "the same error at the same step": ([failed(1), failed(2)], 3, False),
    "at another step": ([failed(1), failed(2, 8)], 3, True),
    "another error there": ([failed(1), failed(2, type="builtins.OSError")], 3, True),
    "the same with a stop between": ([failed(1), ended(2, "stopped"), failed(3)], 3, False),
    "killed at the same step": ([died(1, step=7), died(2, step=7)], 3, True),
    **{
        f"{name.rpartition('.')[2]} of the world": ([failed(1, type=name), failed(2, type=name)], 3, True)
        for name in OURS
    },
}


@pytest.mark.parametrize("case", RETRIED)
def test_a_retry_is_made_if_it_may_help(case: str) -> None:
    attempts, retries, again = RETRIED[case]
    assert retry_verdict(attempts, retries).retry == again


def test_a_repeated_error_is_named_and_a_retry_starts_anew() -> None:
    assert "builtins.ValueError at step 7" in retry_verdict([failed(1), failed(2)], 3).reason
    assert retry_verdict([failed(1), failed(2), failed(3)], 3, after=2).retry


def test_a_snapshot_is_fatal_after_two_deaths_without_a_step() -> None:
    at, other = name_of(8, 1), name_of(6, 1)
    once = died(1, resumed_from=at)
    for harmless in (
        [once],
        [once, died(2, resumed_from=other)],
        [once, died(2, resumed_from=at, first_step_at=3.0)],
        [once, Attempt(2, outcome="stopped", resumed_from=at)],
        [once, Attempt(2, outcome="user_error", resumed_from=at)],
        [once, Attempt(2, outcome="lost", resumed_from=at)],
        [died(1), died(2)],
        [once, died(2, resumed_from=at), Attempt(3, outcome="lost", resumed_from=at, first_step_at=3.0)],
    ):
        assert fatal_snapshots(harmless) == {}
    assert fatal_snapshots([once, died(2, resumed_from=other), died(3, resumed_from=at)]) == {at: [1, 3]}


@pytest.mark.parametrize("kind", ["done", "died", "stopped"])
def test_a_stop_after_an_attempts_end_changes_no_verdict(kind: Kind, tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    log = AttemptLog(store)
    log.record_stop()
    log.record(log.begin(), Outcome(kind, "as it was"))
    verdict = log.verdict(3)
    log.record_stop()
    [last] = log.attempts()
    assert (last.outcome, last.error, last.stopped is None) == (kind, "as it was", kind == "stopped")
    assert log.verdict(3) == verdict
    assert summary_of("run", store).state == "stopped"
    log.record(log.begin(), Outcome("done"))
    assert summary_of("run", store).state == "done"
