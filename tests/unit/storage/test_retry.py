"""Waiting for a store that does not answer."""

import pytest

from midstride.engine.storage.retry import RetryPolicy


def test_pauses_grow_and_differ() -> None:
    now, pauses = [0.0], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    def fail() -> None:
        raise ConnectionError("no")

    with pytest.raises(ConnectionError):
        RetryPolicy(100.0, lambda: now[0], sleep).call(fail, "a store")
    assert now[0] == pytest.approx(100.0)
    assert all(limit / 2 <= pause <= limit for pause, limit in zip(pauses, (0.2, 0.4, 0.8, 1.6), strict=False))
    assert max(pauses) <= 10.0
    with pytest.raises(ConnectionError):
        RetryPolicy(0.0, lambda: now[0], sleep).call(fail, "a store")


def test_what_came_from_no_answer_is_waited_for() -> None:
    answers = [ConnectionError("no"), None]

    def act() -> str:
        if (error := answers.pop(0)) is not None:
            raise OSError("a client's own words") from error
        return "yes"

    assert RetryPolicy(100.0, sleep=lambda seconds: None).call(act, "a store") == "yes"


def test_what_is_wrong_for_good_is_not_waited_for() -> None:
    def fail() -> None:
        raise PermissionError("no")

    with pytest.raises(PermissionError):
        RetryPolicy(1e9).call(fail, "a store")
