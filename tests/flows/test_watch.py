"""A request to stop is never lost, wherever it comes."""

import signal

import pytest

from midstride.tasks.stop_requests import stop_delayed


def asked(times: int, called: list[str]) -> None:
    with stop_delayed():
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        called.append("to its end")


@pytest.mark.parametrize(("times", "expected"), [(1, ["to its end"]), (2, [])])
def test_a_stop_that_comes_while_prefect_is_called_is_not_lost(times: int, expected: list[str]) -> None:
    called: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        asked(times, called)
    assert called == expected
    assert signal.getsignal(signal.SIGINT) is before
