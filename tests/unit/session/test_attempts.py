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


def test_what_a_retry_cannot_change_is_not_retried() -> None:
    assert not retry_verdict([Attempt(1, outcome="user_error")], 3).retry
    assert not retry_verdict([Attempt(1, outcome="done")], 3).retry
    superseded = Outcome.of(Superseded("x"))
    assert not retry_verdict([Attempt(1, outcome=superseded.kind, type=superseded.type)], 3).retry


def test_a_stop_is_resumed_and_not_counted() -> None:
    attempts = [died(1), Attempt(2, outcome="stopped"), died(3)]
    assert retry_verdict(attempts[:2], 0).retry
    assert retry_verdict(attempts, 2).retry
    assert not retry_verdict(attempts, 1).retry


def test_retries_count_attempts_without_progress() -> None:
    attempts = [died(number) for number in (1, 2, 3, 4)]
    assert [retry_verdict(attempts[:count], 3).retry for count in (1, 2, 3, 4)] == [True, True, True, False]
    assert not retry_verdict([died(1)], 0).retry


def test_a_lost_attempt_counts() -> None:
    assert not retry_verdict([Attempt(1), Attempt(2)], 1).retry


def test_a_newer_snapshot_refills_them() -> None:
    attempts = [died(1), died(2), died(3, snapshot=name_of(20, 3)), died(4, resumed_from=name_of(20, 3)), died(5)]
    assert retry_verdict(attempts, 2).retry
    again = died(6, resumed_from=name_of(20, 3), snapshot=name_of(20, 6))
    assert not retry_verdict([*attempts, again], 2).retry
    further = died(6, resumed_from=name_of(20, 3), snapshot=f"{20:012d}.0003-g000006")
    assert retry_verdict([*attempts, further], 2).retry


def test_the_same_error_at_the_same_step_twice_is_not_bad_luck() -> None:
    first, second = died(1, type="builtins.ValueError", step=7), died(2, type="builtins.ValueError", step=7)
    verdict = retry_verdict([first, second], 3)
    assert (verdict.retry, "builtins.ValueError at step 7" in verdict.reason) == (False, True)
    assert retry_verdict([first, died(2, type="builtins.ValueError", step=8)], 3).retry
    assert retry_verdict([first, died(2, type="builtins.OSError", step=7)], 3).retry
    assert not retry_verdict(
        [first, Attempt(2, outcome="stopped"), died(3, type="builtins.ValueError", step=7)], 3
    ).retry


def test_being_killed_at_the_same_step_twice_may_be_bad_luck() -> None:
    assert retry_verdict([died(1, step=7), died(2, step=7)], 3).retry


def test_the_worlds_own_errors_may_pass() -> None:
    name = "midstride.engine.errors.SnapshotError"
    assert retry_verdict([died(1, type=name, step=7), died(2, type=name, step=7)], 3).retry


def test_who_asks_by_hand_gets_as_many_again() -> None:
    attempts = [died(number, type="builtins.ValueError", step=7) for number in (1, 2)]
    assert not retry_verdict(attempts, 3).retry
    third = died(3, type="builtins.ValueError", step=7)
    assert retry_verdict([*attempts, third], 3, after=2).retry


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
