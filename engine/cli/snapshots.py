"""`midstride snapshots list | verify | prune | repair`: snapshots of a run or of a store."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated

from cyclopts import App, Parameter

from midstride.engine.cli.output import AsJson, busy, print_json
from midstride.engine.cli.table import escape, show_table, table_console
from midstride.engine.errors import JobError, UserError
from midstride.engine.formatting import printable
from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.snapshots.forks import pinned
from midstride.engine.snapshots.inspection import Finding, inspect_run
from midstride.engine.snapshots.lease import newest
from midstride.engine.snapshots.parent import PARENT, with_parent
from midstride.engine.snapshots.repair import repairs
from midstride.engine.storage.store import Store

__all__ = ["Url", "runs_at", "snapshots"]

Url = Annotated[str, Parameter(help="A run, or a store of runs: a folder or an fsspec URL.")]
Keep = Annotated[int, Parameter(help="How many to keep, beside the one that the newest attempt resumed from.")]
Yes = Annotated[bool, Parameter(name="--yes", help="Make the changes, instead of only listing them.", negative=())]

snapshots = App(name="snapshots", help="Look at the snapshots of a run, or of all runs of a store.")


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
        pins = {name: pinned(store) for name, store in runs}
        result = {name: _prune(store, keep, pins[name]) for name, store in runs}
    if as_json:
        print_json(result)
        return 0
    for name, went in result.items():
        print(f"{printable(name)}: {len(went['removed'])} removed, {len(went['kept'])} kept")
        for snapshot, forks in pins[name].items():
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
        print("nothing was changed: --yes does what is said here")
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
    return left


def _is_done(name: str, act: Callable[[], object]) -> bool:
    """Make one repair. Print the reason if that fails, such as a link that leads elsewhere."""
    try:
        act()
    except OSError as error:
        print(printable(f"{name}: this was not done: {error}"))
        return False
    return True


def _prune(store: Store, keep: int, pins: Collection[str]) -> dict[str, list[str]]:
    catalog, lease = SnapshotCatalog(store), newest(store)
    resumed_from = [lease.resumed_from] if lease and lease.resumed_from else []
    removed = catalog.prune(keep, also=[*resumed_from, *pins])
    return {"removed": removed, "kept": [snapshot.name for snapshot in catalog.snapshots()]}


@contextmanager
def runs_at(url: str) -> Iterator[list[tuple[str, Store]]]:
    """Yield the runs at `url` with their names: one run, or a folder of runs.

    Errors of the store are explained.
    """
    store = Store.open(url)
    with store.errors_explained("read"):
        if _is_run(store):
            yield [(url, with_parent(store))]
            return
        runs = [(name, with_parent(store.at(name))) for name in store.list() if _is_run(store.at(name))]
        if not runs:
            raise UserError(f"{url} is no run and holds none: name a run's folder or URL, or the store of all runs.")
        yield runs


def _is_run(store: Store) -> bool:
    return bool({"run.json", "lease", "snapshots", PARENT} & set(store.list()))


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
