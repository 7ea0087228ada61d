"""Two or more runs side by side: different settings and reached values. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from midstride.engine.loggers.delivery import read_run_json
from midstride.engine.runs.run import job_of
from midstride.engine.runs.run_report import Report, metric_rows, report_at
from midstride.engine.state.bounds import damaged_on_error
from midstride.engine.storage.store import Store

__all__ = ["RunComparison", "compare_runs", "flat_settings"]

#: of a job: where its runs and code lie decides nothing
_PLACES = ("snapshots.url", "folder")


@dataclass(frozen=True)
class RunComparison:
    """Runs side by side; each list has one entry for each run, None where a run has none.

    Args:
        runs: their names.
        settings: key of the job -> the values; if one is a script's run, name of what decides the weights -> the
            values. Only those that differ.
        values: name -> the values: the state, steps, results of the test, best and last logged values.
        rows: the metric log of each run.
    """

    runs: list[str]
    settings: dict[str, list[Any]]
    values: dict[str, list[Any]]
    rows: list[list[dict[str, str]]]


def compare_runs(stores: Mapping[str, Store]) -> RunComparison:
    """Return the runs in `stores`, by name, side by side; an error of a store names it."""
    jobs, scripts = list[dict[str, Any]](), list[dict[str, Any]]()
    values, rows = list[dict[str, Any]](), list[list[dict[str, str]]]()
    for store in stores.values():
        with store.errors_explained("read"):
            jobs.append(_settings_of_job(store))
            scripts.append(_settings_of_script(store))
            rows.append(metric_rows(store))
            values.append(_values(report_at(store), rows[-1]))
    side_by_side = _side_by_side(jobs if all(jobs) else scripts)  # every run has the latter
    differing = {key: found for key, found in side_by_side.items() if any(one != found[0] for one in found)}
    return RunComparison([*stores], differing, _side_by_side(values), rows)


def _side_by_side(tables: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: [table.get(name) for table in tables] for name in names}


def _settings_of_job(store: Store) -> dict[str, Any]:
    """Return the settings of a run's job by key path; none for a script's run."""
    job = job_of(store)
    found = flat_settings(job.model_dump(mode="json")) if job is not None else ()
    return {key: value for key, value in found if key not in _PLACES}


def _settings_of_script(store: Store) -> dict[str, Any]:
    """Return what decides the weights of a run, and the settings of its optimizers."""
    if not store.exists("run.json"):
        return {}
    stated = read_run_json(store)
    with damaged_on_error(f"{store.url}/run.json"):
        return dict(flat_settings({**stated.get("identity", {}), **stated.get("settings", {})}))


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
