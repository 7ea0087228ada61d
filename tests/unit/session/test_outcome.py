"""How a world ended is decided from what its ranks wrote, and from nothing else."""

import threading
from pathlib import Path

import pytest
from support.limit import LIMIT_S

from midstride.engine.errors import (
    JobError,
    SnapshotError,
    StopRequested,
    StoreFull,
    Superseded,
    UserCodeError,
    UserError,
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
        (KeyboardInterrupt(), "stopped", 75),  # `test_formats.py` has the errors of the engine
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


CODES = (0, 1, 134, None)
NEWER = Outcome.of(Superseded("x"))
#: case -> outcomes of ranks, exit code of the launcher (None: it was asked to stop), ranks; kind and rank decided
DECIDED: dict[str, tuple[list[Outcome], int | None, int, tuple[str, int | None]]] = {
    **{f"done, the launcher {code}": ([said("done", 0), said("done", 1)], code, 2, ("done", None)) for code in CODES},
    "the earliest user error outweighs all": (
        [said("died", 0, 1.0), said("user_error", 1, 3.0), said("user_error", 2, 2.0), said("stopped", 3)],
        *(1, 4, ("user_error", 2)),
    ),
    "a stop before a death": ([said("stopped", 0, 1.0), said("died", 1, 5.0)], 1, 2, ("stopped", None)),
    "a death before a stop": ([said("stopped", 0, 5.0), said("died", 1, 1.0)], 1, 2, ("died", 1)),
    "a stop after a silent death": ([said("stopped", 0)], 1, 2, ("died", None)),
    "a stop on request, though a rank was killed": ([said("stopped", 0)], None, 2, ("stopped", None)),
    "a request, and no word": ([], None, 2, ("died", None)),
    "a newer world outweighs a silent rank": ([NEWER], 1, 2, (NEWER.kind, NEWER.rank)),
    "the earliest death": ([said("died", 0, 5.0), said("died", 1, 1.0), said("done", 2)], 1, 3, ("died", 1)),
}


@pytest.mark.parametrize("case", DECIDED)
def test_outcomes_of_ranks_decide(case: str) -> None:
    outcomes, exit_code, ranks, (kind, rank) = DECIDED[case]
    found = decide(outcomes, exit_code, ranks)
    assert found.kind == kind
    assert rank is None or found.rank == rank


def test_a_silent_rank_is_the_cause_of_other_errors() -> None:
    outcome = decide([said("died", 0, error="lost the connection", type="RuntimeError", step=4)], 1, 3)
    assert (outcome.kind, outcome.type, outcome.rank, outcome.step) == ("died", "", 1, 4)
    assert outcome.error.startswith("ranks 1, 2 ended without a word")
    assert outcome.error.endswith("rank 0 then said: lost the connection")
    assert "signal 9" in decide([], 137, 1).error
    assert decide([NEWER], 1, 2) == NEWER


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
    monkeypatch.setattr(worker, "_TOGETHER_S", 2 * LIMIT_S)
    session = Session(tmp_path)
    session.write_outcome(said("done", 0))
    rank = worker.RankProcess(session, World(rank=0, size=2, local_rank=0, local_size=2))
    leaving = threading.Thread(target=rank._wait_for_peers)
    leaving.start()
    session.write_outcome(said("stopped", 1))
    leaving.join(LIMIT_S)
    assert not leaving.is_alive()


def test_a_machine_without_a_folder_for_temporary_files_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_usable(prefix: str) -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.mkdtemp", none_usable)
    with pytest.raises(UserError, match="no folder takes temporary files, neither TMPDIR nor /tmp"):
        Session.create({"run": "a"})
