# pyright: reportAttributeAccessIssue=false
# names that protobuf makes, and where the library is not installed
"""TensorBoard: one event file, which holds the committed rows and nothing else."""

import io
import json
import os
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from midstride.engine.errors import UserError
from midstride.engine.loggers.base import CommittedRows, Conclusion, LoggedRun, Logger, Row
from midstride.engine.snapshots.row_times import RowTimes

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

__all__ = ["TensorBoardLogger"]

_NAME = "events.out.tfevents.{:010d}.midstride"
#: tag of the text that says why the run ended, the first value of a conclusion
_ENDED = "ended"
#: beside the events in a `log_dir`, which runs from several places may share
_MARK = "midstride-run.json"


class TensorBoardLogger(Logger):
    """Writes scalars as 32-bit numbers to `log_dir/RUN`.

    `tensorboard --logdir log_dir` shows the runs by name.

    Args:
        log_dir: a folder; by default the one that holds the runs.
    """

    def __init__(self, log_dir: str | None = None) -> None:
        self._log_dir = log_dir
        self._file: BinaryIO | None = None
        self._run: LoggedRun | None = None
        self._concluded: set[bytes] = set()

    def open(self, run: LoggedRun, rows: CommittedRows) -> int:
        """Open the event file; rewrite it if it has rows that the run has dropped.

        Raises:
            UserError: the runs are in no folder, and no `log_dir` is given; or that has another run of the same name.
        """
        self._run, folder = run, self._folder(run)
        self._concluded = set()
        folder.mkdir(parents=True, exist_ok=True)
        if self._log_dir is not None:
            _claim(folder, run)
        files = sorted(folder.glob(_NAME.format(0).replace("0" * 10, "*")))
        newest = files[-1] if files else None
        for older in files[:-1]:
            older.unlink()
        if newest is not None:
            step, good, is_all = _agreement(newest, rows, _hyperparameters(run), self._concluded)
            if is_all:
                os.truncate(newest, good)  # rest of a torn record
                self._file = newest.open("ab", buffering=0)
                return step
            newest.unlink()
        number = int(newest.name.split(".")[-2]) + 1 if newest else 1
        self._file = (folder / _NAME.format(number)).open("xb", buffering=0)
        self._begin(run)
        return 0

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Append an event for each row."""
        from tensorboard.compat.proto.event_pb2 import Event

        now, times = time.time(), self._run.times if self._run else RowTimes()
        events = [Event(wall_time=times.of(row.step) or now, step=row.step, summary=_summary(row)) for row in rows]
        self._write(events)

    def conclude(self, conclusion: Conclusion) -> None:
        """Append an event with why the run ended, the results of its test and its report."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        ended, *others = _conclusion(conclusion).value
        new = [value for value in (ended, *others) if _told(conclusion.step, value) not in self._concluded]
        if new:
            summary = Summary(value=[ended, *(value for value in new if value is not ended)])
            self._write([Event(wall_time=time.time(), step=conclusion.step, summary=summary)])
            self._concluded.update(_told(conclusion.step, value) for value in new)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _folder(self, run: LoggedRun) -> Path:
        if self._log_dir is not None:
            return Path(self._log_dir) / run.name
        if "://" in run.url:
            raise UserError(
                f"the event file cannot be written beside the run, at {run.url}: name a folder, "
                "loggers: [{tensorboard: {log_dir: /path}}]"
            )
        return Path(run.url)

    def _begin(self, run: LoggedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        now = time.time()
        events = [
            Event(wall_time=now, file_version="brain.Event:2"),
            # A TensorBoard that already shows the run drops events of an earlier file.
            Event(wall_time=now, step=0, session_log=SessionLog(status=SessionLog.START)),
            Event(wall_time=now, step=0, summary=_hyperparameters(run)),
        ]
        self._write(events)

    def _write(self, events: Sequence["Event"]) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        records = io.BytesIO()
        writer = RecordWriter(records)
        for event in events:
            writer.write(event.SerializeToString())
        left = records.getbuffer()
        while left and self._file is not None:  # a disk that becomes full takes a part, and says so at the next write
            left = left[self._file.write(left) :]


def _claim(folder: Path, run: LoggedRun) -> None:
    """Record the owner of the events in `folder`. Refuse a folder of another run of this name."""
    mark, ours = folder / _MARK, {"run_id": run.run_id, "url": run.url}
    try:
        noted = json.loads(mark.read_text())
    except (FileNotFoundError, ValueError):  # new, or cut off by a death
        noted = {}
    # A moved run keeps its id, a restarted one its place.
    if noted and noted["run_id"] != run.run_id and noted["url"] != run.url:
        raise UserError(
            f"{folder} has the events of another run of this name, at {noted['url']}: give one of the two jobs another "
            "log_dir. If the other run no longer exists, remove this folder"
        )
    if noted != ours:
        mark.write_text(json.dumps(ours))


def _hyperparameters(run: LoggedRun) -> Any:
    """Return the content of the tabs of texts and hyperparameters, equal each time."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb

    named = dict(sorted(run.hparams.items()))
    table = "\n".join(["| name | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in named.items())])
    plain = {name: value if isinstance(value, bool | int | float) else str(value) for name, value in named.items()}
    tab = hparams_pb(plain, trial_id=run.name, start_time_secs=0)
    return Summary(value=[_text("hyperparameters", table), *tab.value])


def _conclusion(conclusion: Conclusion) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    texts = [_text(_ENDED, conclusion.why), *([_text("report", conclusion.report)] if conclusion.report else [])]
    test = [Summary.Value(tag=tag, simple_value=value) for tag, value in conclusion.test.items()]
    return Summary(value=[*texts, *test])


def _told(step: int, value: Any) -> bytes:
    return f"{step} ".encode() + bytes(value.SerializeToString())


def _text(tag: str, markdown: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    tensor = TensorProto(dtype=DT_STRING, string_val=[markdown.encode()])
    return Summary.Value(tag=tag, tensor=tensor, metadata=metadata)


def _summary(row: Row) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = {"epoch": float(row.epoch), **row.values}
    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])


def _agreement(path: Path, rows: CommittedRows, hyperparameters: Any, concluded: set[bytes]) -> tuple[int, int, bool]:
    """Compare a file with the run's rows and hyperparameters. Extend `concluded` by its ends.

    Returns:
        The step of the last row in which both agree, the bytes up to its end, and whether the file holds no other row.
    """
    expected, step, good = iter(rows), 0, 0
    for event, end in _events(path):
        if event.summary.value and event.summary.value[0].tag == _ENDED:
            concluded.update(_told(event.step, value) for value in event.summary.value)
        elif event.step > 0:
            row = next(expected, None)
            if row is None or row.step != event.step:
                return step, good, False
            if _summary(row).SerializeToString() != event.summary.SerializeToString():
                return step, good, False
            step = row.step
        elif event.HasField("summary") and event.summary != hyperparameters:
            return 0, 0, False
        good = end
    return step, good, good > 0


def _events(path: Path) -> Iterator[tuple["Event", int]]:
    """Yield the events of a file and the end of each, without a torn event at its end."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    end = 0
    with path.open("rb") as file:
        while len(header := file.read(12)) == 12 and not _is_torn(header):
            (size,) = struct.unpack("<Q", header[:8])
            body = file.read(size + 4)
            if len(body) < size + 4 or _is_torn(body):
                return
            try:
                event = Event.FromString(body[:-4])
            except DecodeError:  # damaged: TensorBoard reads no further
                return
            end += 16 + size
            yield event, end


def _is_torn(part: bytes) -> bool:
    """Whether zeros, which a power cut leaves, reach into the checksum that `part` ends with.

    Only then is it computed: in Python that takes 100 us, and a file has an event for each step.
    """
    from tensorboard.summary.writer.record_writer import masked_crc32c

    return part[-1] == 0 and struct.unpack("<I", part[-4:])[0] != masked_crc32c(part[:-4])
