"""`midstride compare RUN RUN`: settings that differ, values, and a picture of the curves."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape

from midstride.engine.cli.output import busy, print_json
from midstride.engine.cli.snapshots import runs_at
from midstride.engine.cli.table import show_table, table_console
from midstride.engine.errors import UserError
from midstride.engine.formatting import format_number, url_name
from midstride.engine.runs.curves import draw_runs
from midstride.engine.runs.run_comparison import RunComparison, compare_runs
from midstride.engine.storage.draft import draft_of

__all__ = ["show_comparison"]


def show_comparison(urls: Sequence[str], picture: Path | None, as_json: bool) -> int:
    """Show the runs at `urls` side by side; draw their curves into the file `picture`."""
    with busy(f"reading {len(urls)} runs"), ExitStack() as reading:
        found = [one for url in urls for one in reading.enter_context(runs_at(url))]
        if len(found) < 2:
            raise UserError(f"{' '.join(urls) or 'nothing'}: two runs are needed. Name runs, or the store of all runs")
        names = [url_name(store.url) for _, store in found]
        clear = names if len(set(names)) == len(names) else [store.url for _, store in found]
        compared = compare_runs(dict(zip(clear, (store for _, store in found), strict=True)))
    if picture is not None:
        _draw(picture, compared)
    if as_json:
        print_json({name: value for name, value in asdict(compared).items() if name != "rows"})
        return 0
    console, columns = table_console(), ("", *compared.runs)
    for title, table in (("settings that differ", compared.settings), ("values", compared.values)):
        rows = [[escape(name), *map(_cell, values)] for name, values in table.items()]
        show_table(console, title, columns, rows or [["none", *("" for _ in compared.runs)]], texts=("",))
    if picture is not None:
        print(f"curves  {picture}")
    return 0


def _cell(value: Any) -> str:
    if value is None:
        return ""
    is_float = isinstance(value, float)
    return format_number(value) if is_float else escape(str(value))


def _draw(path: Path, compared: RunComparison) -> None:
    drawn = draw_runs(dict(zip(compared.runs, compared.rows, strict=True)))
    if drawn is None:
        raise UserError(f"{path} has nothing to show: matplotlib is not installed, or the runs have logged nothing")
    try:
        with draft_of(path) as draft:
            draft.write_bytes(drawn)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}. Name another file") from error
