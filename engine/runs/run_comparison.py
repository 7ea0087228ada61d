"""Two or more runs side by side: different settings and reached values. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from midstride.engine.loggers.delivery import read_run_json
from midstride.engine.runs.run import job_of
from midstride.engine.runs.run_report import Report, metric_rows, report_at
from midstride.engine.storage.store import Store

__all__ = ["RunComparison", "compare_runs", "flat_settings"]

#: of a job: where its runs and code lie decides nothing
_PLACES = ("snapshots.url", "folder")


@dataclass(frozen=True)
class RunComparison:
    """Runs side by side; each list has one entry for each run, None where a run has none.

    Args:
        runs: their names.
        settings: key of the job, or name of a script's hyperparameter -> the values; only those that differ.
        values: name -> the values: the state, steps, results of the test, best and last logged values.
        rows: the metric log of each run.
    """

    runs: list[str]
    settings: dict[str, list[Any]]
    values: dict[str, list[Any]]
    rows: list[list[dict[str, str]]]


def compare_runs(stores: Mapping[str, Store]) -> RunComparison:
    """Return the runs in `stores`, by name, side by side; an error of a store names it."""
    settings, values, rows = list[dict[str, Any]](), list[dict[str, Any]](), list[list[dict[str, str]]]()
    for store in stores.values():
        with store.errors_explained("read"):
            settings.append(_settings(store))
            rows.append(metric_rows(store))
            values.append(_values(report_at(store), rows[-1]))
    side_by_side = _side_by_side(settings)
    differing = {key: found for key, found in side_by_side.items() if any(one != found[0] for one in found)}
    return RunComparison([*stores], differing, _side_by_side(values), rows)


def _side_by_side(tables: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: [table.get(name) for table in tables] for name in names}


def _settings(store: Store) -> dict[str, Any]:
    """Return a run's settings by key path: its job's, or its script's hyperparameters."""
    job = job_of(store)
    if job is not None:
        found = dict(flat_settings(job.model_dump(mode="json")))
        return {key: value for key, value in found.items() if key not in _PLACES}
    return dict(flat_settings(read_run_json(store))) if store.exists("run.json") else {}


def flat_settings(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested dicts, each with its key path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flat_settings(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _values(report: Report, rows: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    last = {name: float(text) for row in rows for name, text in row.items() if text and name not in ("epoch", "step")}
    return {
        "state": report.outcome,
        "steps": report.steps,
        "epochs": report.epochs,
        "restarts": report.restarts,
        **{f"test: {name}": value for name, value in report.test.items()},
        **{f"best {name}": value for name, value in report.best.items() if name == report.monitor},
        **{f"last {name}": value for name, value in last.items()},
    }
