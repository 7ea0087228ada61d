"""What trackers hold of a run, read back by their own readers; and loggers that die with their rank."""

import csv
import io
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from support.ports import free_ports

from midstride.engine.loggers.base import CommittedRows, LoggedRun, Row
from midstride.engine.loggers.mlflow import MLflowLogger
from midstride.engine.loggers.tensorboard import TensorBoardLogger
from midstride.engine.loggers.wandb import WandbLogger
from midstride.engine.processes.lifetime import descendants
from midstride.engine.processes.supervised_process import SupervisedProcess

#: for a server to end in peace
GRACE_S = 5.0
#: step -> name -> value
Table = dict[int, dict[str, Any]]


class Dies:
    """Kills the rank, and with it this process, once at each of some steps: rows were sent, and no process knows it.

    Args:
        marks: folder where a kill leaves a file.
        steps: a kill comes when the row of one of them is sent.
        torn: the last thing sent is not whole.
    """

    def __init__(self, marks: str, steps: Sequence[int], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._marks, self._steps = Path(marks), steps

    def log_rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            super().log_rows([row])
            mark = self._marks / f"died-{row.step}"
            if row.step in self._steps and not mark.exists():
                self.tear()
                mark.touch()
                os.kill(os.getppid(), signal.SIGKILL)
                signal.pause()

    def tear(self) -> None:
        """Leave a part of what would have come next."""


class DyingTensorBoard(Dies, TensorBoardLogger):
    """An event file whose last record is cut."""

    def tear(self) -> None:
        assert self._file is not None
        self._file.write(b"\x40\0\0\0\0\0\0\0half")


class Away(TensorBoardLogger):
    """TensorBoard, that cannot be reached while there is a file.

    Args:
        away: the file.
    """

    def __init__(self, away: str) -> None:
        super().__init__()
        self._away = Path(away)

    def open(self, run: LoggedRun, rows: CommittedRows) -> int:
        if self._away.exists():
            raise ConnectionError("no answer")
        return super().open(run, rows)


class Silent(TensorBoardLogger):
    """TensorBoard, whose process cannot say what it has not sent.

    Args:
        how: it "exits", or "hangs".
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self._how = how

    def open(self, run: LoggedRun, rows: CommittedRows) -> int:
        if self._how == "exits":
            sys.exit(1)
        time.sleep(600)
        return 0


def rows_of(run: Path) -> Table:
    """Return the rows of a run's metrics.csv."""
    rows = csv.DictReader(io.StringIO((run / "metrics.csv").read_text()))
    return {int(row["step"]): {k: float(v) for k, v in row.items() if v and k != "step"} for row in rows}


def in_tensorboard(folder: Path) -> Table:
    """Return the scalars that TensorBoard reads in a folder, and fail on a step that it reads twice."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=False)
    accumulator.Reload()
    table: Table = {}
    for tag in accumulator.Tags()["scalars"]:
        for event in accumulator.Scalars(tag):
            assert tag not in table.setdefault(event.step, {}), f"{tag} of step {event.step} is there twice"
            table[event.step][tag] = event.value
    return table


def hyperparameters_in_tensorboard(folder: Path) -> dict[str, Any]:
    """Return what the tab of hyperparameters reads in a folder, and fail where it would read it twice."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    [file] = folder.glob("events.out.tfevents.*")
    values = [value for event in EventFileLoader(str(file)).Load() for value in event.summary.value]
    [told] = [value for value in values if value.metadata.plugin_data.plugin_name == "hparams"]
    found = HParamsPluginData.FromString(told.metadata.plugin_data.content).session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in found.items()}


class DyingMLflow(Dies, MLflowLogger):
    """An MLflow run whose rows are there, and no process knows it."""


class DyingWandb(Dies, WandbLogger):
    """An offline folder that is left behind."""


def _finished(uri: str, experiment: str) -> tuple[Any, Any]:
    """Return a client, and the MLflow run `run` of an experiment."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    found = client.search_runs(
        [client.get_experiment_by_name(experiment).experiment_id], "tags.`mlflow.runName` = 'run'"
    )
    superseded = [run for run in found if run.info.status == "KILLED"]
    assert len(superseded) <= 1, "a death made a new run: only a step back does"
    [run] = [run for run in found if run.info.status == "FINISHED"]
    return client, run


def hyperparameters_in_mlflow(uri: str, experiment: str) -> dict[str, str]:
    """Return the parameters of the MLflow run `run` of an experiment."""
    params: dict[str, str] = _finished(uri, experiment)[1].data.params
    return params


def in_mlflow(uri: str, experiment: str) -> Table:
    """Return the metrics of the MLflow run `run` of an experiment, and fail on a step that one has twice."""
    client, found = _finished(uri, experiment)
    table: Table = {}
    for key in found.data.metrics:
        for metric in client.get_metric_history(found.info.run_id, key):
            assert key not in table.setdefault(metric.step, {}), f"{key} of step {metric.step} is there twice"
            table[metric.step][key] = metric.value
    return table


def ended_in_mlflow(uri: str, experiment: str) -> dict[str, Any]:
    """Return what the newest MLflow run of an experiment says of its end, its artifacts, and the kind of experiment."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    place = client.get_experiment_by_name(experiment)
    [run] = client.search_runs([place.experiment_id], "tags.`mlflow.runName` = 'run'", max_results=1)
    said = {name: value for name, value in run.data.metrics.items() if name.startswith("test/")}
    said |= {"why": run.data.tags["midstride.why"], "status": run.info.status}
    said["kind"] = place.tags["mlflow.experimentKind"]
    for name in ("hyperparameters.json", "report.md"):  # the client would leave threads
        try:
            with urlopen(f"{uri}/get-artifact?path={name}&run_uuid={run.info.run_id}", timeout=60) as answer:
                text = answer.read().decode()
        except HTTPError:
            continue
        said[name] = str(json.loads(text)["module_args.lr"]) if name.endswith("json") else text
    return said


def _leveldb_records(log: bytes) -> Iterator[bytes]:
    """Yield the records of a log as LevelDB writes it, and W&B after a header of 7 bytes; none may be cut."""
    at, whole = 7, b""
    while at < len(log):
        if 32768 - at % 32768 < 7:  # the rest of a block that has no room for a header
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack("<HB", log[at + 4 : at + 7])
        whole += log[at + 7 : at + 7 + size]
        at += 7 + size
        assert at <= len(log), "the last record is cut"
        if kind in (1, 4):  # the whole, or the last part
            yield whole
            whole = b""


def _wandb_records(folder: Path, run: str) -> Iterator[Any]:
    """Yield what is in the one offline folder of a run."""
    from wandb.proto.wandb_internal_pb2 import Record

    [file] = folder.glob(f"wandb/offline-run-*-{run}-{'?' * 8}/run-{run}-{'?' * 8}.wandb")
    yield from map(Record.FromString, _leveldb_records(file.read_bytes()))


def hyperparameters_in_wandb(folder: Path, run: str) -> dict[str, Any]:
    """Return the config in the one offline folder of a run."""
    [began] = [record.run for record in _wandb_records(folder, run) if record.WhichOneof("record_type") == "run"]
    return {item.key: json.loads(item.value_json) for item in began.config.update}


def ended_in_wandb(folder: Path, run: str) -> dict[str, Any]:
    """Return what the summary in the one offline folder of a run says of its end."""
    said: dict[str, Any] = {}
    for record in _wandb_records(folder, run):
        if record.WhichOneof("record_type") == "summary":
            said |= {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.summary.update
            }
    return {name: value for name, value in said.items() if name == "ended" or name.startswith("test/")}


def in_wandb(folder: Path, run: str) -> Table:
    """Return the history in the one offline folder of a run, and fail on a step that is there twice."""
    table: Table = {}
    for record in _wandb_records(folder, run):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = items.pop("_step", record.history.step.num)
            assert step not in table, f"step {step} is there twice"
            table[step] = {name: value for name, value in items.items() if not name.startswith("_")}
    return table


@contextmanager
def serve_mlflow(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Give the address of an MLflow server on sqlite, and its processes, which end with the block or this process."""
    address = f"http://127.0.0.1:{free_ports(1)[0]}"
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", address.rpartition(":")[2]),
        *("--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", f"{folder}/artifacts"),
        *("--workers", "1"),
    ]
    log = folder / "mlflow.log"
    # Its runner of jobs would start consumers without an end where their library (huey) is not installed.
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with SupervisedProcess(command, environment=environment, log=log, grace_s=GRACE_S) as server:
        while True:
            try:
                with urlopen(f"{address}/health", timeout=5) as answer:
                    assert answer.status == 200
                break
            except OSError:  # nothing listens, or what listens is not ready to answer
                assert server.poll() is None, log.read_text()[-2000:]
                time.sleep(0.2)
        yield address, [server.pid, *descendants(server.pid)]
