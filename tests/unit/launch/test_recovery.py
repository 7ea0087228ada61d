"""Attempts whose launcher was killed: recorded as any other, whatever else is in the temporary folder."""

import functools
import json
import os
import re
import signal
import socket
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.flow_runs import tiny_job

from midstride.engine.cli.stop_signals import stoppable
from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import StopRequested
from midstride.engine.launch.launch import _record_attempt
from midstride.engine.launch.recovery import recover_orphaned_attempts
from midstride.engine.runs.run import Run
from midstride.engine.session import events
from midstride.engine.session.attempts import Attempt, AttemptLog
from midstride.engine.session.events import EventLog, EventTail
from midstride.engine.session.outcome import Outcome
from midstride.engine.session.session import Session
from midstride.engine.storage.store import Store

#: kind -> fields, of every kind of event that adds to an attempt
TELLING: dict[str, dict[str, Any]] = {
    "started": {"step": 0, "steps_total": 24, "generation": 4},
    "resumed": {"generation": 5, "resumed_from": "000000000005-g000004", "step": 5},
    "step": {"epoch": 0, "step": 6, "steps_total": 24, "loss": 0.5, "rate": 3.0},
    "snapshot": {"name": "000000000010-g000005", "step": 10, "bytes": 1, "stall_s": 0.1},
    "slow": {"rank": 1, "words": "rank 1 is slow"},
    "round": {"number": 2, "nodes": ["gpu07"], "ranks": 1, "why": "gpu08 was silent"},
    "finished": {"step": 24, "epoch": 3, "ended_by": "max_steps", "why": "max_steps 24 reached"},
}
#: those that do not
OTHERS = ("imported", "met", "waiting", "validation")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainingJob:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return tiny_job(tmp_path)


def killed(job: TrainingJob, started: float = 1.0) -> tuple[AttemptLog, Session]:
    """What a launcher leaves that was killed a while ago."""
    store = Store.open(job.run_url("night"))
    store.write("attempts/000001.json", json.dumps({"number": 1, "started": started}).encode())
    return AttemptLog(store), Session.create(Run(job, "night").document(1, started))


def test_every_kind_of_event_is_known_here() -> None:
    table = (events.__doc__ or "").partition("\nkind ")[2]
    assert {*re.findall(r"^([a-z]+)  ", table, re.MULTILINE)} == {*TELLING, *OTHERS}


@pytest.mark.parametrize("kinds", [*((kind,) for kind in TELLING), (*TELLING, *OTHERS)], ids="-".join)
def test_the_attempt_of_a_killed_launcher_is_recorded_as_usual(job: TrainingJob, kinds: tuple[str, ...]) -> None:
    log, session = killed(job)
    for kind in kinds:
        EventLog(session.events).emit(kind, **TELLING.get(kind, {}))
    (begun,) = log.attempts()
    expected = functools.reduce(Attempt.after, EventTail(session.events).new(), begun)
    assert expected != begun
    session.write_outcome(Outcome("stopped", "asked to stop"))
    (found,) = recover_orphaned_attempts(Run(job, "night"))
    assert found.error == "the process that launched this world was killed; then asked to stop"
    ended = {name: getattr(found, name) for name in ("outcome", "code", "error", "ended", "ended_by", "why")}
    assert (found.ended_by, found.why) == ("stopped", "stopped on request")
    assert found == replace(expected, **ended)
    assert [attempt.generation for attempt in log.attempts()] == [expected.generation]
    assert not session.folder.exists()


@pytest.mark.parametrize("number", [0, 1], ids=["an operation, such as prepare", "an attempt"])
def test_the_session_of_a_living_launcher_is_left_alone(
    job: TrainingJob, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the machine's load: `prepare` of a run without a folder looks like one of a deleted run."""
    log, left = killed(job)
    left.remove()
    run, begun = Run(job, "night" if number else "day"), list[Path]()
    begin = Session.begin

    def look(session: Session, document: dict[str, Any]) -> None:
        begin(session, document)
        assert recover_orphaned_attempts(Run(job, "night")) == []
        begun.append(session.folder)

    monkeypatch.setattr(Session, "begin", look)
    with Session.held(run.document(number, 1.0)) as session:
        assert begun == [session.folder]
        assert session.folder.exists()
        assert recover_orphaned_attempts(Run(job, "night")) == []
        assert session.folder.exists()
    assert [attempt.outcome for attempt in log.attempts()] == ["lost"]
    assert len(recover_orphaned_attempts(Run(job, "night"))) == number
    assert not session.folder.exists()


@pytest.mark.parametrize(
    "outcome", [Outcome("died", "rank 1 hung", rank=1, step=5), Outcome("done", step=24)], ids=lambda one: one.kind
)
def test_an_unrecorded_end_is_recorded_later(
    job: TrainingJob, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, session = killed(job)
    (begun,), printed = log.attempts(), list[str]()

    def refuse(*_: Any) -> None:
        raise PermissionError("no more writes")

    with monkeypatch.context() as patch:
        patch.setattr(AttemptLog, "record", refuse)
        _record_attempt(Run(job, "night"), begun, outcome, session, printed.append)
    assert "attempt 1 could not be recorded" in printed[0]
    (found,) = recover_orphaned_attempts(Run(job, "night"))
    assert (found.outcome, found.step, found.rank) == (outcome.kind, outcome.step, outcome.rank)
    assert found.error.startswith(outcome.error)
    assert "the store did not accept the end of this attempt (no more writes)" in found.error
    assert "killed" not in found.error


@pytest.mark.parametrize(
    ("name", "attempt"), [("night", 1), ("night", 2), ("day", 1)], ids=["begun anew", "a later attempt", "another run"]
)
def test_what_a_deleted_run_left_is_removed_and_not_told(job: TrainingJob, name: str, attempt: int) -> None:
    log, session = killed(job, started=50.0)
    deleted = Session.create(Run(job, name).document(attempt, 2.0))
    deleted.write_outcome(Outcome("died", "of the deleted run"))
    session.write_outcome(Outcome("stopped", "asked to stop"))
    (found,) = recover_orphaned_attempts(Run(job, "night"))
    assert found.error.endswith("then asked to stop")
    assert [one.error for one in log.attempts()] == [found.error]
    assert not deleted.folder.exists()


def fifo(path: Path, session: Session) -> None:
    os.mkfifo(path)


def link(path: Path, session: Session) -> None:
    path.symlink_to(session.folder / path.name)


def folder(path: Path, session: Session) -> None:
    path.mkdir()


def socket_(path: Path, session: Session) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def of_another(path: Path, session: Session) -> None:
    path.write_bytes((session.folder / path.name).read_bytes())
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:
        path.unlink()


def nested(path: Path, session: Session) -> None:
    path.write_text("[" * 100_000 + "\n")


FOREIGN = [
    (make, name)
    for make in (fifo, link, folder, socket_, of_another, nested)
    for name in ("job.json", "events.jsonl", "outcome-rank-00000.json")
    if (make, name) != (nested, "events.jsonl")  # a wrong line of events is left out, and the rest counts
]


@pytest.mark.parametrize(("make", "name"), FOREIGN)
def test_foreign_files_in_the_temporary_folder_are_harmless(
    job: TrainingJob, make: Callable[[Path, Session], None], name: str
) -> None:
    log, session = killed(job)
    EventLog(session.events).emit("started", **TELLING["started"])
    session.write_outcome(Outcome("died", "x"))
    strange = session.folder.with_name("midstride-aaa")
    strange.mkdir()
    for other in ("job.json", "events.jsonl", "outcome-rank-00000.json"):
        if other != name:
            (strange / other).write_bytes((session.folder / other).read_bytes())
    make(strange / name, session)
    settled = recover_orphaned_attempts(Run(job, "night"))
    assert [attempt.generation for attempt in settled] == [4]
    assert strange.exists()
    assert [attempt.outcome for attempt in log.attempts()] == ["died"]


def test_links_to_sessions_are_not_followed(job: TrainingJob) -> None:
    _, session = killed(job)
    theirs = session.folder.rename(session.folder.with_name("elsewhere"))
    session.folder.symlink_to(theirs)
    assert recover_orphaned_attempts(Run(job, "night")) == []
    assert theirs.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_stop_inside_the_recovery_is_heard(
    job: TrainingJob, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(job)
    raised = []

    def read(session: Session) -> None:
        raised.append(session)
        signal.raise_signal(number)

    monkeypatch.setattr(Session, "document", read)
    with pytest.raises(StopRequested, match=f"asked to stop by {number.name}"), stoppable():
        recover_orphaned_attempts(Run(job, "night"))
    assert len(raised) == 1


def test_a_second_signal_says_that_nothing_more_is_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    def asked_twice() -> None:
        with stoppable():
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(StopRequested):
        asked_twice()
    first, second = (line for line in capfd.readouterr().err.splitlines() if line)
    assert first == "SIGINT: stopping, after a last snapshot if there is anything to keep"
    assert second == "SIGINT again: ending at once"
