"""How a world ended is decided from what its ranks wrote, and from nothing else."""

import threading
from pathlib import Path

import pytest

from midstride.engine.errors import (
    JobError,
    SnapshotError,
    StopRequested,
    StoreFull,
    Superseded,
    UserCodeError,
    WorldError,
)
from midstride.engine.launch import rank as worker
from midstride.engine.session.events import EventLog, EventTail
from midstride.engine.session.outcome import Kind, Outcome, decide, raise_for_outcome
from midstride.engine.session.session import Session
from midstride.engine.world import World


def said(kind: Kind, rank: int, time: float = 0.0, **more: object) -> Outcome:
    return Outcome(kind, rank=rank, time=time, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (StopRequested("x"), "stopped", 75),
        (Superseded("x"), "stopped", 75),
        (KeyboardInterrupt(), "stopped", 75),
        (JobError("x"), "user_error", 2),
        (UserCodeError("x"), "user_error", 2),
        (SnapshotError("x"), "died", 1),
        (RuntimeError("x"), "died", 1),
        (SystemExit(3), "died", 1),
    ],
)
def test_an_exception_decides_the_kind(error: BaseException, kind: str, code: int) -> None:
    outcome = Outcome.of(error, rank=2, step=7)
    assert (outcome.kind, outcome.code, outcome.rank, outcome.step) == (kind, code, 2, 7)
    assert outcome.type.endswith(type(error).__name__)


#: an error that ended a rank -> the class that is raised for it, and that of its cause
RAISED: list[tuple[BaseException, type[Exception], type[Exception] | None]] = [
    (StopRequested("x"), StopRequested, None),
    (Superseded("x"), Superseded, None),
    (KeyboardInterrupt("x"), StopRequested, None),
    (JobError("x"), JobError, None),
    (UserCodeError("x"), UserCodeError, None),
    (SnapshotError("x"), WorldError, SnapshotError),
    (StoreFull("x"), WorldError, StoreFull),
    (RuntimeError("x"), WorldError, None),
]


@pytest.mark.parametrize(("error", "kind", "cause"), RAISED, ids=lambda value: type(value).__name__)
def test_the_class_of_an_error_is_kept(
    error: BaseException, kind: type[Exception], cause: type[Exception] | None
) -> None:
    with pytest.raises(kind, match="x") as caught:
        raise_for_outcome(Outcome.of(error))
    assert type(caught.value) is kind
    assert type(caught.value.__cause__) is (cause or type(None))


@pytest.mark.parametrize("exit_code", [0, 1, 134, None])
def test_done_is_done_whatever_the_launcher_says(exit_code: int | None) -> None:
    assert decide([said("done", 0), said("done", 1)], exit_code, 2).kind == "done"


def test_the_earliest_user_error_outweighs_all() -> None:
    outcomes = [said("died", 0, 1.0), said("user_error", 1, 3.0), said("user_error", 2, 2.0), said("stopped", 3)]
    assert decide(outcomes, 1, 4).rank == 2


def test_what_came_first_is_told() -> None:
    assert decide([said("stopped", 0, 1.0), said("died", 1, 5.0)], 1, 2).kind == "stopped"
    assert decide([said("stopped", 0, 5.0), said("died", 1, 1.0)], 1, 2).kind == "died"


def test_a_stop_after_a_silent_death_is_the_launchers_doing() -> None:
    assert decide([said("stopped", 0)], 1, 2).kind == "died"


def test_a_stop_that_was_asked_for_stays_one_though_a_rank_had_to_be_killed() -> None:
    assert decide([said("stopped", 0)], None, 2).kind == "stopped"
    assert decide([], None, 2).kind == "died"


def test_a_newer_world_outweighs_a_silent_rank() -> None:
    newer = Outcome.of(Superseded("x"))
    assert decide([newer], 1, 2) == newer


def test_the_earliest_death_is_told() -> None:
    assert decide([said("died", 0, 5.0), said("died", 1, 1.0), said("done", 2)], 1, 3).rank == 1


def test_a_silent_rank_is_the_cause_and_the_others_errors_follow_from_it() -> None:
    outcome = decide([said("died", 0, error="lost the connection", type="RuntimeError", step=4)], 1, 3)
    assert (outcome.kind, outcome.type, outcome.rank, outcome.step) == ("died", "", 1, 4)
    assert outcome.error.startswith("ranks 1, 2 ended without a word")
    assert outcome.error.endswith("rank 0 then said: lost the connection")


def test_nobody_said_anything() -> None:
    assert "signal 9" in decide([], 137, 1).error


def test_the_first_word_of_a_rank_is_its_last(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.write_outcome(said("done", 1, 1.0))
    session.write_outcome(said("died", 1, 2.0))
    session.write_outcome(said("stopped", 0, 2.0, error="é", step=3))
    assert session.outcomes() == [said("stopped", 0, 2.0, error="é", step=3), said("done", 1, 1.0)]


def test_events_are_handed_out_once_and_whole(tmp_path: Path) -> None:
    log, tail = EventLog(tmp_path / "events.jsonl"), EventTail(tmp_path / "events.jsonl")
    assert tail.new() == []
    log.emit("step", step=1, loss=0.5)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"kind": "step", "ti')
    assert [event.fields for event in tail.new()] == [{"step": 1, "loss": 0.5}]
    assert tail.new() == []  # half a line waits
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('me": 1.0, "step": 2}\n')
    assert [event.fields["step"] for event in tail.new()] == [2]
    assert tail.new() == []


def test_a_rank_that_is_done_leaves_once_the_others_have_spoken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_TOGETHER_S", 60.0)
    session = Session(tmp_path)
    session.write_outcome(said("done", 0))
    rank = worker.RankProcess(session, World(rank=0, size=2, local_rank=0, local_size=2))
    leaving = threading.Thread(target=rank._wait_for_peers)
    leaving.start()
    session.write_outcome(said("stopped", 1))
    leaving.join(50)
    assert not leaving.is_alive()
