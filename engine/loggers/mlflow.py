# pyright: reportAttributeAccessIssue=false
# where the library is not installed
"""MLflow: one run of an experiment, its rows each once, and the best weights as an artifact."""

import hashlib
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from midstride.engine.loggers.base import CommittedRows, Conclusion, LoggedRun, Logger, Row
from midstride.engine.snapshots.row_times import RowTimes

__all__ = ["MLflowLogger"]

#: tag that names the run of midstride, and tag that says up to which step which rows were sent
_RUN, _ROWS = "midstride.run_id", "midstride.rows"
#: tag that says why a run ended
_WHY = "midstride.why"
#: outcome of a run -> status in MLflow
_STATUS = {"done": "FINISHED", "stopped": "KILLED"}
#: tag of an experiment by which MLflow's page shows trainings, and not agents
_KIND, _TRAINING = "mlflow.experimentKind", "custom_model_development"
#: alias of the version that is in charge; tag of a version: the digest of its weights; their folder in the MLflow run
_CHAMPION, _WEIGHTS, _FOLDER = "champion", "midstride.weights", "champion"
#: MLflow's limits of one request
_METRICS, _PARAMS, _PARAM_LENGTH = 1000, 100, 6000


class MLflowLogger(Logger):
    """Logs to the MLflow run of the same name; all attempts of a run log to one.

    MLflow can take no row back. A run that went back behind rows that were sent gets a new MLflow run, with all its
    rows; the old one stays, without the tag by which it was found.

    Args:
        tracking_uri: of the server; by default MLFLOW_TRACKING_URI.
        experiment: name of the experiment, made if there is none; in a job by default its name.
        registered_model: name of the model in MLflow's registry of which each champion becomes a version; the one in
            charge has the alias "champion". By default the registry is left alone.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str = "midstride",
        registered_model: str | None = None,
    ) -> None:
        self._uri, self._experiment, self._model = tracking_uri, experiment, registered_model
        self._client: Any = None
        self._run_id = ""
        self._digest = xxhash.xxh3_128()  # of all rows that the tracker has
        self._run: LoggedRun | None = None
        self._status = "FINISHED"

    def open(self, run: LoggedRun, rows: CommittedRows) -> int:
        """Find the MLflow run, or make one."""
        self._run, self._status = run, "FINISHED"
        client = self._connect()
        mark, found = _mark(run), self._found(run)
        step = self._agreement(found[0], rows) if found else 0
        if found and step is not None:
            self._run_id = found[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
        else:
            for superseded in found:
                client.set_tag(superseded.info.run_id, _RUN, f"{mark} until {time.time():.0f}")
                client.set_terminated(superseded.info.run_id, "KILLED")
            self._digest.reset()
            self._run_id = self._new_run(run).info.run_id
        self._log_params(run, found[0].data.params if found and step is not None else {})
        return step or 0

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Send rows, and in the same request the step up to which the run is sent."""
        from mlflow.entities import Metric, RunTag

        now_s, times = time.time(), self._run.times if self._run else RowTimes()
        for several in _requests(rows):
            for row in several:
                self._digest.update(repr(row).encode())
            metrics = [
                Metric(_name(key), value, int((times.of(row.step) or now_s) * 1000), row.step)
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
        self._client.set_terminated(self._run_id, self._status)

    def conclude(self, conclusion: Conclusion) -> None:
        """Log the end as a tag, its test as metrics, hyperparameters and report as artifacts."""
        from mlflow.entities import Metric

        client, run_id = self._client, self._run_id
        known, now_ms = client.get_run(run_id).data.metrics, int(time.time() * 1000)
        test = {_name(key): value for key, value in conclusion.test.items()}
        new = [Metric(key, value, now_ms, conclusion.step) for key, value in test.items() if known.get(key) != value]
        if new:
            client.log_batch(run_id, metrics=new)
        client.set_tag(run_id, _WHY, conclusion.why)
        client.log_dict(run_id, dict(self._run.hparams) if self._run else {}, "hyperparameters.json")
        if conclusion.report:
            client.log_text(run_id, conclusion.report, "report.md")
        self._status = _STATUS.get(conclusion.outcome, "FAILED")

    def promote(self, run: LoggedRun, weights: Path) -> None:
        """Publish the weights as a version of the registered model, once, and move the alias to it."""
        if self._model is None:
            return
        client = self._connect()
        digest = _digest(weights)
        versions = client.search_model_versions(f"name = '{self._model}' and tags.`{_WEIGHTS}` = '{digest}'")
        if versions:
            version = versions[0].version
        else:
            [source] = self._found(run) or [self._new_run(run)]
            client.log_artifact(source.info.run_id, str(weights), _FOLDER)
            self._need_model()
            tags = {_WEIGHTS: digest, _RUN: _mark(run), "midstride.url": run.url}
            where = f"{source.info.artifact_uri}/{_FOLDER}"
            version = client.create_model_version(
                self._model, where, source.info.run_id, tags=tags, await_creation_for=None
            ).version
        client.set_registered_model_alias(self._model, _CHAMPION, version)

    def _connect(self) -> Any:
        # This process has its own loop for an unreachable server.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        from mlflow import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # a database that it makes is no news of the training
        self._client = MlflowClient(tracking_uri=self._uri)
        return self._client

    def _found(self, run: LoggedRun) -> list[Any]:
        """Return the MLflow run, if there is one."""
        return list(self._client.search_runs([self._experiment_id()], f"tags.`{_RUN}` = '{_mark(run)}'", max_results=1))

    def _new_run(self, run: LoggedRun) -> Any:
        tags = {_RUN: _mark(run), "midstride.url": run.url}
        return self._client.create_run(self._experiment_id(), tags=tags, run_name=run.name)

    def _need_model(self) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.create_registered_model(self._model)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        if (known := self._client.get_experiment_by_name(self._experiment)) is None:
            try:
                return str(self._client.create_experiment(self._experiment, tags={_KIND: _TRAINING}))
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


def _mark(run: LoggedRun) -> str:
    """Return a tag that all attempts of `run` share with no other run."""
    return run.run_id or run.url


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _name(key: str) -> str:
    """Return `key` with the characters that MLflow takes in names."""
    return re.sub(r"[^\w\-. :/]", "_", key)


def _requests(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield rows in groups, one per request. A row with too many metrics is one group."""
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
