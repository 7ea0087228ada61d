"""The event file, where the process that wrote it was killed."""

from pathlib import Path

import pytest
from support.trackers import in_tensorboard

from midstride.engine.loggers.base import CommittedRows, LoggedRun, Row
from midstride.engine.loggers.tensorboard import TensorBoardLogger

SEGMENTS = ["epoch,step,loss\n0,1,0.5\n0,2,0.25\n", "epoch,step,loss\n0,3,0.125\n"]


@pytest.mark.parametrize("left_bytes", [0, 1, 11, 12, 20])
def test_what_a_kill_left_of_an_event_is_cut_off(left_bytes: int, tmp_path: Path) -> None:
    run, rows = LoggedRun("a", str(tmp_path), "id", {"lr": 0.1}), CommittedRows(SEGMENTS)
    logger = TensorBoardLogger()
    assert logger.open(run, CommittedRows([])) == 0
    logger.log_rows([*rows])
    logger.close()
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:left_bytes])  # the beginning of an event: twelve bytes of length, then its content

    again = TensorBoardLogger()
    assert again.open(run, rows) == 3
    again.log_rows([Row(0, 4, {"loss": 0.0625})])
    again.close()

    assert [*tmp_path.iterdir()] == [file]
    assert in_tensorboard(tmp_path) == {
        step: {"epoch": 0.0, "loss": loss} for step, loss in enumerate([0.5, 0.25, 0.125, 0.0625], 1)
    }
