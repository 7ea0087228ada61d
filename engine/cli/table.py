"""Prints a table, whose rows become blocks on a terminal too narrow for whole words."""

from collections.abc import Sequence

from rich import markup
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from midstride.engine.formatting import printable

__all__ = ["escape", "show_table", "table_console"]

#: columns of a terminal on which nothing is wrapped
_WIDE = 10_000
#: columns of an output that is no terminal, such as a file
_WIDTH = 160


def escape(text: str) -> str:
    """Return markup that shows `text`, its control characters written out."""
    return markup.escape(printable(text))


def table_console() -> Console:
    """Return standard output, as wide as the terminal; files and pipes get room for tables."""
    return Console(width=None if Console().is_terminal else _WIDTH, highlight=False)


def show_table(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    texts: Sequence[str],
    heads: Sequence[str] = (),
) -> None:
    """Print `rows` of markup.

    Args:
        console: where to.
        title: markup.
        columns: their names.
        rows: a cell for each column.
        texts: the columns that are no numbers.
        heads: those of them that head the block that a row becomes; all if empty.
    """
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in texts else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    if console.measure(table, options=console.options.update(width=_WIDE)).maximum <= console.width:
        console.print(table)
        return
    console.print(f"[italic]{title}[/]")
    for row in rows:
        named = list(zip(columns, row, strict=True))
        head = "  ".join(cell for column, cell in named if column in (heads or texts) and cell)
        console.print(f"{columns[0]} {head}", soft_wrap=True)
        told = ", ".join(f"{column} {cell}" for column, cell in named if column not in (heads or texts) and cell)
        console.print(Padding(told, (0, 0, 0, 2), expand=False), soft_wrap=False)
