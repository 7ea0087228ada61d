# pyright: reportAttributeAccessIssue=false
# where the library is not installed
"""MLflow: one run of an experiment, its rows each once, and the best weights as an artifact."""

import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from midstride.engine.loggers.base import CommittedRows, LoggedRun, Logger, Row

__all__ = ["MLflowLogger"]

#: tag that names the run of midstride, and tag that says up to which step which rows were sent
_RUN, _ROWS = "midstride.run_id", "midstride.rows"
#: what MLflow takes in one request
_METRICS, _PARAMS, _PARAM_LENGTH = 1000, 100, 6000


class MLflowLogger(Logger):
    """Logs to the MLflow run of the same name; all attempts of a run log to one.

    MLflow can take no row back. A run that went back behind rows that were sent gets a new MLflow run, with all its
    rows; the old one stays, without the tag by which it was found.

    Args:
        tracking_uri: of the server; by default what MLFLOW_TRACKING_URI says.
        experiment: name of the experiment, made if there is none; in a job by default its name.
    """

    def __init__(self, tracking_uri: str | None = None, experiment: str = "midstride") -> None:
        self._uri, self._experiment = tracking_uri, experiment
        self._client: Any = None
        self._run_id = ""
        self._digest = xxhash.xxh3_128()  # of all rows that the tracker has

    def open(self, run: LoggedRun, rows: CommittedRows) -> int:
        """Find the MLflow run, or make one."""
        # This process has a loop of its own for a server that is away.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        from mlflow import MlflowClient

        self._client = client = MlflowClient(tracking_uri=self._uri)
        experiment, mark = self._experiment_id(), run.run_id or run.url
        found = client.search_runs([experiment], f"tags.`{_RUN}` = '{mark}'", max_results=1)
        step = self._agreement(found[0], rows) if found else 0
        if found and step is not None:
            self._run_id = found[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
        else:
            for superseded in found:
                client.set_tag(superseded.info.run_id, _RUN, f"{mark} until {time.time():.0f}")
                client.set_terminated(superseded.info.run_id, "KILLED")
            self._digest.reset()
            tags = {_RUN: mark, "midstride.url": run.url}
            self._run_id = client.create_run(experiment, tags=tags, run_name=run.name).info.run_id
        self._log_params(run, found[0].data.params if found and step is not None else {})
        return step or 0

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Send rows, and in the same request up to where the run is sent by now."""
        from mlflow.entities import Metric, RunTag

        now_ms = int(time.time() * 1000)
        for several in _requests(rows):
            for row in several:
                self._digest.update(repr(row).encode())
            metrics = [
                Metric(_name(key), value, now_ms, row.step)
                for row in several
                for key, value in {**row.values, "epoch": float(row.epoch)}.items()
            ]
            done = RunTag(_ROWS, f"{several[-1].step} {self._digest.hexdigest()}")
            for first in range(0, len(metrics), _METRICS):
                last = first + _METRICS >= len(metrics)
                self._client.log_batch(
                    self._run_id, metrics=metrics[first : first + _METRICS], tags=[done] if last else ()
                )

    def finish(self, best: Path | None) -> None:
        """Log the best weights as an artifact, in the folder `weights`, and end the MLflow run."""
        if best is not None:
            self._client.log_artifact(self._run_id, str(best), "weights")
        self._client.set_terminated(self._run_id)

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        if (known := self._client.get_experiment_by_name(self._experiment)) is None:
            try:
                return str(self._client.create_experiment(self._experiment))
            except MlflowException:  # another run made it meanwhile
                known = self._client.get_experiment_by_name(self._experiment)
        return str(known.experiment_id)

    def _agreement(self, found: Any, rows: CommittedRows) -> int | None:
        """Return the last step that an MLflow run has of `rows`; None if it has others."""
        # A request's metrics are one transaction of the server's; its tags are another.
        history = self._client.get_metric_history(found.info.run_id, "epoch")
        sent = max((metric.step for metric in history), default=0)
        tagged, _, digest = found.data.tags.get(_ROWS, f"0 {xxhash.xxh3_128().hexdigest()}").partition(" ")
        self._digest.reset()
        seen = 0
        for row in rows:
            if row.step > int(tagged) and digest:
                if self._digest.hexdigest() != digest:
                    return None
                digest = ""
            if row.step > sent:
                break
            self._digest.update(repr(row).encode())
            seen = row.step
        if seen != sent or (digest and self._digest.hexdigest() != digest):
            return None
        return sent

    def _log_params(self, run: LoggedRun, known: dict[str, str]) -> None:
        from mlflow.entities import Param

        params = [Param(_name(key), str(value)[:_PARAM_LENGTH]) for key, value in run.hparams.items()]
        new = [param for param in params if param.key not in known]  # a value, once logged, stays
        for first in range(0, len(new), _PARAMS):
            self._client.log_batch(self._run_id, params=new[first : first + _PARAMS])


def _name(key: str) -> str:
    """Return `key` with the characters that MLflow takes in names."""
    return re.sub(r"[^\w\-. :/]", "_", key)


def _requests(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield rows in groups that go into one request; a row of more metrics than that is a group of its own."""
    group: list[Row] = []
    metrics = 0
    for row in rows:
        size = len(row.values) + 1
        if group and metrics + size > _METRICS:
            yield group
            group, metrics = [], 0
        group.append(row)
        metrics += size
    if group:
        yield group
