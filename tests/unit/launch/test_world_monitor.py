"""Tests of what a launcher knows of its world, also where a receiver of events fails, and when it asks something."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from midstride.engine.config.world import WorldOptions
from midstride.engine.launch import launch
from midstride.engine.launch.watchdog import Watchdog
from midstride.engine.session.attempts import Attempt
from midstride.engine.session.events import Event, EventLog
from midstride.engine.session.session import Session


def test_a_failing_receiver_loses_no_line_and_no_snapshot(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: Event) -> None:
        raise ConnectionError(f"no answer to {event.kind}")

    session, lines = Session(tmp_path), list[str]()
    events = EventLog(session.events)
    events.emit("resumed", generation=3, resumed_from=None, step=0)
    events.emit("snapshot", name="000000000020-g000003", step=20)
    watchdog = Watchdog(session, WorldOptions())
    monitor = launch._WorldMonitor(session, Attempt(3, started=0.0), watchdog, lines.append, fail)
    monitor.announce("the last line")

    monitor.hand_on_rest()
    assert monitor.outcome(1, 5.0).kind == "died"
    assert (monitor.attempt.generation, monitor.attempt.snapshot) == (3, "000000000020-g000003")
    assert lines == ["the last line"]
    assert caplog.messages == ["the last lines of attempt 3 cannot be shown: no answer to resumed"]


def test_a_snapshot_is_asked_for_once_the_ranks_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGUSR1 before that is ignored by a rank: what was asked by a notice of the first moment was lost."""
    monkeypatch.setattr(launch, "_LINES_EVERY_S", 0.0)
    session = Session(tmp_path)
    events = EventLog(session.events)
    happens = iter(
        [
            ("resumed", {"generation": 3, "resumed_from": None, "step": 0}),
            ("started", {"generation": 3, "step": 0}),
            ("round", {"number": 2}),
            ("resumed", {"generation": 4, "resumed_from": None, "step": 0}),
            ("started", {"generation": 4, "step": 0}),
            ("step", {"step": 1}),
        ]
    )
    seen, asked = list[str](), list[str]()

    def wait(timeout_s: float) -> int | None:
        if (event := next(happens, None)) is None:
            return 0
        events.emit(event[0], **event[1])
        if event[0] in ("resumed", "step"):
            monitor.snapshot_on_notice("notice")
        return None

    monitor = launch._WorldMonitor(
        session,
        Attempt(3, started=0.0),
        Watchdog(session, WorldOptions()),
        lambda line: None,
        lambda event: seen.append(event.kind),
    )
    monitor.until_end(
        SimpleNamespace(wait=wait, lines=list, ask_for_snapshot=lambda: asked.append(seen[-1])), lambda: None
    )
    assert asked == ["started", "started", "step"]
