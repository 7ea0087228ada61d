"""`midstride runs` and `midstride report`: results of a store's runs, and of one of them."""

import time
from typing import Annotated

from cyclopts import Parameter

from midstride.engine.cli.output import AsJson, busy, print_json
from midstride.engine.cli.report_view import show_report, show_runs
from midstride.engine.cli.snapshots import Url, runs_at
from midstride.engine.cli.table import table_console
from midstride.engine.errors import UserError
from midstride.engine.formatting import url_name
from midstride.engine.runs.run_report import report_at
from midstride.engine.runs.summary import summary_of

__all__ = ["report", "runs"]

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
