"""`midstride champion list | show | rollback`: the champions of the jobs of a store."""

import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

from cyclopts import App, Parameter

from midstride.engine.cli.output import AsJson, print_json
from midstride.engine.cli.table import escape, show_table, table_console
from midstride.engine.config.import_paths import make_importable
from midstride.engine.errors import UserError
from midstride.engine.formatting import printable
from midstride.engine.registry.registry import FOLDER, Champion, ModelRegistry
from midstride.engine.registry.tracker_promotion import publish_champion
from midstride.engine.runs.run import job_of
from midstride.engine.storage.store import Store

__all__ = ["champion", "listeners"]

Url = Annotated[str, Parameter(help="The store of all runs: a folder or an fsspec URL.")]
Job = Annotated[str | None, Parameter(help="Name of the job, if the store has champions of several.")]

#: who else hears of a roll-back: the registry, who left, who is back. `midstride` tells Prefect's server
listeners: list[Callable[[ModelRegistry, Champion, Champion], object]] = []

champion = App(name="champion", help="Show the champion of a job, or restore the previous one.")


@champion.command(name="list")
def list_champions(url: Url, *, job: Job = None, as_json: AsJson = False) -> int:
    """List the champions of each job, oldest first."""
    found = {
        registry.name: [_described(registry, one) for one in registry.champions()] for registry in _registries(url, job)
    }
    if as_json:
        print_json(found)
        return 0
    console, columns = table_console(), ("run", "number", "promoted", "why")
    for name, champions in found.items():
        rows = [[escape(str(one[column])) for column in columns] for one in champions]
        show_table(console, escape(name), columns, rows, ("run", "promoted", "why"), heads=("run",))
    return 0


@champion.command
def show(url: Url, *, job: Job = None, as_json: AsJson = False) -> int:
    """Show the champion, why it was promoted, and where its weights are."""
    registry = _only_registry(url, job)
    fields = _described(registry, _current(registry))
    if as_json:
        print_json(fields)
        return 0
    for name in ("run", "promoted", "why", "weights"):
        print(f"{name:>8}  {printable(str(fields[name]))}")
    return 0


@champion.command
def rollback(url: Url, *, job: Job = None) -> int:
    """Make the champion before this one champion again; given once more, the one before that."""
    registry = _only_registry(url, job)
    left, back = _current(registry), registry.roll_back()
    where = registry.weights_url(back)
    print(printable(f"{back.run} is champion of {registry.name} again, after {left.run}: {where}"))
    runs = Store.open(url)
    for run in (left, back):  # a champion outlives its run
        if (its_job := job_of(runs.at(run.run))) is not None:
            make_importable(its_job.folder)
            for message in publish_champion(registry, runs, its_job.loggers):
                print(message, file=sys.stderr)
            break
    for tell in listeners:
        tell(registry, left, back)
    return 0


def _registries(url: str, job: str | None) -> list[ModelRegistry]:
    store = Store.open(url)
    with store.errors_explained("read"):
        names = store.list(FOLDER)
    if not names:
        raise UserError(f"{url} has no champions: name the store of all runs, the folder above those of the runs.")
    if job is not None and job not in names:
        raise UserError(f"{url} has no champion of a job {job!r}; it has those of {', '.join(names)}.")
    return [ModelRegistry(store.at(f"{FOLDER}/{name}")) for name in names if job in (None, name)]


def _only_registry(url: str, job: str | None) -> ModelRegistry:
    registries = _registries(url, job)
    if len(registries) > 1:
        raise UserError(
            f"{url} has champions of several jobs: choose one with --job: {', '.join(one.name for one in registries)}."
        )
    return registries[0]


def _current(registry: ModelRegistry) -> Champion:
    found = registry.current()
    if found is None:  # its weights were copied, and then it was killed
        raise UserError(f"{registry.name} has no champion yet: repeat its night, or promote a run")
    return found


def _described(registry: ModelRegistry, one: Champion) -> dict[str, Any]:
    why = one.decision.why if one.decision else "a roll-back"
    promoted = datetime.fromtimestamp(one.time).strftime("%Y-%m-%d %H:%M:%S")
    decision = one.decision and one.decision.model_dump()
    fields = {**asdict(one), "decision": decision}
    return {**fields, "promoted": promoted, "why": why, "weights": registry.weights_url(one)}
