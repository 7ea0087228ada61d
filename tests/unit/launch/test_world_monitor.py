"""Tests of what is known of a world where one who hears of it fails."""

from pathlib import Path

import pytest

from midstride.engine.config.world import WorldOptions
from midstride.engine.launch.launch import _WorldMonitor
from midstride.engine.launch.watchdog import Watchdog
from midstride.engine.session.attempts import Attempt
from midstride.engine.session.events import Event, EventLog
from midstride.engine.session.session import Session


def test_a_receiver_that_fails_costs_neither_lines_nor_the_attempt_its_snapshot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: Event) -> None:
        raise ConnectionError(f"no answer to {event.kind}")

    session, lines = Session(tmp_path), list[str]()
    events = EventLog(session.events)
    events.emit("resumed", generation=3, resumed_from=None, step=0)
    events.emit("snapshot", name="000000000020-g000003", step=20)
    watchdog = Watchdog(session, WorldOptions())
    monitor = _WorldMonitor(session, Attempt(3, started=0.0), watchdog, lines.append, fail)
    monitor.announce("the last line")

    assert monitor.outcome(1, 5.0).kind == "died"
    assert (monitor.attempt.generation, monitor.attempt.snapshot) == (3, "000000000020-g000003")
    assert lines == ["the last line"]
    assert caplog.messages == ["what attempt 3 said last is not shown: no answer to resumed"]
