"""Signals that ask a process to stop are known to each of its threads, whoever handles them."""

import asyncio
import os
import select
import signal
import socket
import time
from collections.abc import Iterator

import pytest
from support.flow_runs import wait_for

from midstride.engine.processes import signal_listener
from midstride.engine.processes.signal_listener import listen, read_signals, stop_signal_since

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def _handled() -> Iterator[None]:
    before = {number: signal.signal(number, lambda *_: None) for number in HANDLED}
    assert listen()
    read_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_known_since_it_came(number: signal.Signals) -> None:
    start = time.monotonic()
    assert stop_signal_since(start) is None
    signal.raise_signal(number)
    wait_for(lambda: stop_signal_since(start) == number, "the signal")
    assert stop_signal_since(time.monotonic()) is None


def test_another_signal_is_no_request_to_stop() -> None:
    start = time.monotonic()
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGTERM)  # they are read in order
    wait_for(lambda: stop_signal_since(start) == signal.SIGTERM, "the signal that follows")


def test_an_event_loop_that_listened_before_still_does() -> None:
    async def heard() -> None:
        came = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, came.set)
        assert listen()
        signal.raise_signal(signal.SIGUSR1)
        await came.wait()

    asyncio.run(heard())
    assert listen(), "the loop has switched it off"
    start = time.monotonic()
    signal.raise_signal(signal.SIGTERM)
    wait_for(lambda: stop_signal_since(start), "the signal")


def test_what_has_the_number_of_a_closed_loop_receives_no_signals() -> None:
    async def listens() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: None)
        assert listen()

    asyncio.run(listens())
    signal.signal(signal.SIGUSR1, lambda *_: None)  # the loop has taken its handler away
    others = [end for _ in range(10) for end in socket.socketpair()]  # they have the lowest free numbers
    assert listen()
    start = time.monotonic()
    for _ in range(2):
        signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGTERM)
    wait_for(lambda: stop_signal_since(start), "the signal that follows")
    time.sleep(0.1)  # it is noted before it is passed on
    assert select.select(others, [], [], 0)[0] == []
    for end in others:
        end.close()


def test_a_signal_to_a_fork_is_none_to_its_parent() -> None:
    start = time.monotonic()
    if not (child := os.fork()):
        signal.raise_signal(signal.SIGTERM)
        os._exit(0 if signal_listener._listener is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    signal.raise_signal(signal.SIGINT)
    wait_for(lambda: stop_signal_since(start), "a signal of its own")
    assert stop_signal_since(start) == signal.SIGINT
