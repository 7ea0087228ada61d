"""A request to stop is never lost, wherever it comes."""

import signal

import pytest

from midstride.tasks.watch import _uninterrupted


def test_a_stop_that_comes_while_prefect_is_called_comes_after_it() -> None:
    called = []
    with pytest.raises(KeyboardInterrupt), _uninterrupted():
        signal.raise_signal(signal.SIGINT)
        called.append("to its end")
    assert called
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_one_gets_through_at_once() -> None:
    called = []
    with pytest.raises(KeyboardInterrupt), _uninterrupted():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        called.append("never")
    assert not called
