"""`midstride runs | snapshots list | verify | prune | repair`: runs, and their snapshots."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated

from cyclopts import App, Parameter

from midstride.engine.cli.output import AsJson, busy, print_json
from midstride.engine.cli.report_view import show_report, show_runs
from midstride.engine.cli.table import escape, show_table, table_console
from midstride.engine.errors import JobError, UserError
from midstride.engine.formatting import printable, url_name
from midstride.engine.runs.run import is_run, runs_in
from midstride.engine.runs.run_report import report_at
from midstride.engine.runs.summary import summary_of
from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.snapshots.forks import Pins
from midstride.engine.snapshots.inspection import Finding, inspect_run
from midstride.engine.snapshots.lease import newest
from midstride.engine.snapshots.parent import with_parent
from midstride.engine.snapshots.repair import repairs
from midstride.engine.storage.store import Store

__all__ = ["Url", "report", "runs", "runs_at", "snapshots"]

Url = Annotated[str, Parameter(help="A run, or a store of runs: a folder or an fsspec URL.")]
Keep = Annotated[
    int, Parameter(help="Number of snapshots to keep, beside the one from which the newest attempt resumed.")
]
Yes = Annotated[bool, Parameter(name="--yes", help="Make the changes, instead of only listing them.", negative=())]

snapshots = App(
    name="snapshots", help="List, verify, prune or repair the snapshots of a run or of all runs of a store."
)


@snapshots.command(name="list")
def list_snapshots(url: Url, /, *, as_json: AsJson = False) -> int:
    """List the snapshots and their state; only manifests are read."""
    with busy(f"looking at {url}"), runs_at(url) as runs:
        found = {name: inspect_run(store) for name, store in runs}
    _show(found, as_json)
    return 0


@snapshots.command
def verify(url: Url, /, *, as_json: AsJson = False) -> int:
    """Read every byte of all valid snapshots and verify checksums; end with 1 on damage."""
    with busy(f"reading all of {url}"), runs_at(url) as runs:
        found = {name: inspect_run(store, read=True) for name, store in runs}
    _show(found, as_json)
    return 0 if all(finding.is_good for findings in found.values() for finding in findings) else 1


@snapshots.command
def prune(url: Url, /, *, keep: Keep = 3, as_json: AsJson = False) -> int:
    """Remove all but the newest snapshots of each run, and older uncommitted files."""
    if keep < 1:
        raise JobError.of("prune", [f"--keep: at least 1 is needed, not {keep}: a run without a snapshot starts over"])
    with busy(f"looking at {url}"), runs_at(url) as runs:
        pins = {name: Pins(store) for name, store in runs}
        result = {name: _prune(store, keep, pins[name]) for name, store in runs}
    if as_json:
        print_json(result)
        return 0
    for name, went in result.items():
        print(f"{printable(name)}: {len(went['removed'])} removed, {len(went['kept'])} kept")
        for snapshot, forks in pins[name].known.items():
            print(printable(f"  {snapshot} stays: {', '.join(forks)} starts from it"))
    return 0


@snapshots.command
def repair(url: Url, /, *, yes: Yes = False) -> int:
    """List damaged parts of each run that can be rebuilt; with --yes, rebuild them.

    The run must not be training.
    """
    left = 0
    with busy(f"reading all of {url}"), runs_at(url) as runs:
        for name, store in runs:
            left += _repair(name, store, yes)
    if left and not yes:
        print("nothing was changed: add --yes to perform these actions")
    return 1 if left else 0


def _repair(name: str, store: Store, yes: bool) -> int:
    """Print the repairs of a run, make them if asked to, and return the number not made."""
    done: set[str] = set()
    left = 0
    while found := [one for one in repairs(store) if one.message not in done]:
        for one in found:
            print(printable(f"{name}: {one.message}"))
            if one.act is not None:
                left += int(not (yes and _is_done(name, one.act)))
        done |= {one.message for one in found}
        if not yes:
            break
    if not done:
        print(printable(f"{name}: nothing is damaged"))
    return left


def _is_done(name: str, act: Callable[[], object]) -> bool:
    """Make one repair. Print the reason if that fails, such as a link that leads elsewhere."""
    try:
        act()
    except OSError as error:
        print(printable(f"{name}: this was not done: {error}"))
        return False
    return True


def _prune(store: Store, keep: int, pins: Pins) -> dict[str, list[str]]:
    catalog, lease = SnapshotCatalog(store), newest(store)
    resumed_from = [lease.resumed_from] if lease and lease.resumed_from else []
    removed = catalog.prune(keep, also=[*resumed_from, *pins.read()], pins=pins.read)
    return {"removed": removed, "kept": [snapshot.name for snapshot in catalog.snapshots()]}


@contextmanager
def runs_at(url: str) -> Iterator[list[tuple[str, Store]]]:
    """Yield the runs at `url` with their names: one run, or a folder of runs.

    Errors of the store are explained.
    """
    store = Store.open(url)
    with store.errors_explained("read"):
        if is_run(store):
            yield [(url, with_parent(store))]
            return
        runs = [(name, with_parent(store.at(name))) for name in runs_in(store)]
        if not runs:
            raise UserError(
                f"{url} is not a run and contains none: name a run's folder or URL, or the store of all runs."
            )
        yield runs


def _show(found: dict[str, list[Finding]], as_json: bool) -> None:
    if as_json:
        print_json({run: [one.as_json() for one in findings] for run, findings in found.items()})
        return
    console = table_console()
    columns = ("snapshot", "step", "gen", "bytes", "taken", "state")
    for run, findings in found.items():
        rows = [_cells(finding) for finding in findings]
        show_table(console, escape(run), columns, rows, ("snapshot", "taken", "state"), heads=("snapshot", "state"))
        for finding in findings:
            if finding.reason:  # not in the table, where a path would be broken
                style = None if finding.is_good else "red"
                console.print(printable(f"{finding.name}: {finding.reason}"), style=style, markup=False, soft_wrap=True)


def _cells(finding: Finding) -> list[str]:
    cells = ["", "", "", ""]
    if taken := finding.snapshot:
        time = datetime.fromtimestamp(taken.manifest["time"]).strftime("%m-%d %H:%M:%S")
        cells = [str(taken.position.step), str(taken.generation), f"{taken.bytes:,}", time]
    state = escape(finding.state)
    return [escape(finding.name), *cells, state if finding.is_good else f"[red]{state}[/]"]


RunUrl = Annotated[str, Parameter(help="A run: a folder or an fsspec URL.")]


def runs(url: Url, /, *, as_json: AsJson = False) -> int:
    """List the runs of a store: progress, end, best value, last sign of life."""
    with busy(f"looking at {url}"), runs_at(url) as found:
        summaries = [summary_of(url_name(name), store) for name, store in found]
    if as_json:
        print_json(summaries)
        return 0
    show_runs(table_console(), url, summaries, time.time())
    return 0


def report(url: RunUrl, /, *, as_json: AsJson = False) -> int:
    """Show the result of a run from its folder: values, interruptions and their cost, files."""
    with busy(f"looking at {url}"), runs_at(url) as found:
        if len(found) != 1:
            names = ", ".join(name for name, _ in found[:5])
            raise UserError(f"{url} is a store of {len(found)} runs, not one of them: name one, such as {names}")
        result = report_at(found[0][1])
    if as_json:
        print(result.model_dump_json(indent=1))
        return 0
    show_report(table_console(), result)
    return 0
