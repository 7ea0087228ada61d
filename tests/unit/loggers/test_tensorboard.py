"""The event file, where the process that wrote it was killed, or the disk was full."""

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from support.trackers import in_tensorboard
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from midstride.engine.errors import UserError
from midstride.engine.loggers.base import CommittedRows, LoggedRun, Row
from midstride.engine.loggers.tensorboard import TensorBoardLogger
from midstride.engine.snapshots.row_times import RowTimes

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


def test_rows_have_the_times_of_their_steps(tmp_path: Path) -> None:
    run = LoggedRun("a", str(tmp_path), "id", {}, RowTimes([(0, 100.0), (2, 120.0), (2, 500.0), (4, 600.0)]))
    logger = TensorBoardLogger()
    logger.open(run, CommittedRows([]))
    logger.log_rows([*CommittedRows(SEGMENTS)])
    logger.close()
    accumulator = EventAccumulator(str(tmp_path)).Reload()
    assert [event.wall_time for event in accumulator.Scalars("loss")] == [110.0, 120.0, 550.0]


#: what a power cut or a broken disk makes of a file
_HARMS: dict[str, Callable[[bytes], bytes]] = {
    "zeros behind the last event": lambda whole: whole + bytes(4096),
    "zeros from the middle of an event": lambda whole: whole[:-20] + bytes(4096),
    "zeros from its checksum": lambda whole: whole[:-4] + bytes(4),
    "zeros from the middle of its checksum": lambda whole: whole[:-2] + bytes(2),
    "an event that is none": lambda whole: whole[:-30] + b"\xff" * 10 + whole[-20:],
}


@pytest.mark.parametrize("harm", _HARMS.values(), ids=_HARMS)
def test_what_is_not_as_it_was_written_is_written_again(harm: Callable[[bytes], bytes], tmp_path: Path) -> None:
    run, rows = LoggedRun("a", str(tmp_path), "id", {"lr": 0.1}), CommittedRows(SEGMENTS)
    logger = TensorBoardLogger()
    logger.open(run, CommittedRows([]))
    logger.log_rows([*rows])
    logger.close()
    (file,) = tmp_path.iterdir()
    file.write_bytes(harm(file.read_bytes()))

    again = TensorBoardLogger()
    has = again.open(run, rows)
    again.log_rows([row for row in [*rows, Row(0, 4, {"loss": 0.0625})] if row.step > has])
    again.close()
    assert [*in_tensorboard(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("room_bytes", [0, 15])
def test_an_event_that_a_full_disk_cuts_was_not_sent(room_bytes: int, tmp_path: Path) -> None:
    """It is told by an error, and comes again whole once there is room."""
    run, rows = LoggedRun("a", str(tmp_path), "id", {"lr": 0.1}), CommittedRows(SEGMENTS)
    logger = TensorBoardLogger()
    logger.open(run, CommittedRows([]))
    logger.log_rows([*rows][:2])
    (file,) = tmp_path.iterdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + room_bytes, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            logger.log_rows([*rows][2:])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    logger.close()

    assert logger.open(run, rows) == 2
    logger.log_rows([*rows][2:])
    logger.close()
    assert [*in_tensorboard(tmp_path)] == [1, 2, 3]


def test_events_of_another_run_of_the_name_are_refused(tmp_path: Path) -> None:
    def opened(url: str, run_id: str) -> int:
        logger = TensorBoardLogger(str(tmp_path))
        step = logger.open(LoggedRun("a", url, run_id, {}), CommittedRows(SEGMENTS))
        logger.log_rows([row for row in CommittedRows(SEGMENTS) if row.step > step])
        logger.close()
        return step

    last = CommittedRows(SEGMENTS).last_step
    assert opened("/runs/a", "1") == 0
    assert opened("/moved/a", "1") == last  # the run was moved
    assert opened("/moved/a", "2") == last  # or begun anew, and has logged the same
    with pytest.raises(UserError, match="events of another run of this name, at /moved/a: give one of the two"):
        opened("/others/a", "3")
    (tmp_path / "a" / "midstride-run.json").write_text("{")  # cut off by a death
    assert opened("/others/a", "3") == last
