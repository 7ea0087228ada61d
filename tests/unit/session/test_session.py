"""A session tells whether a rank of its round has started."""

from pathlib import Path

from midstride.engine.session.session import Session


def test_stacks_of_the_round_before_are_no_start(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.stacks(0).touch()
    assert not session.has_started()
    session.heartbeat(0).touch()
    assert session.has_started()
    session.begin_round(1)
    assert not session.has_started()
