"""The report of a run on a terminal, and the outcomes of a store's runs in a table."""

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table

from midstride.engine.cli.table import escape, show_table
from midstride.engine.formatting import format_number, format_seconds
from midstride.engine.runs.report_text import lost_steps, summary_rows
from midstride.engine.runs.run_report import Interruption, Report
from midstride.engine.runs.summary import RunSummary

__all__ = ["show_report", "show_runs"]

_LOOKS = {
    "new": ("none", "not started"),
    "done": ("green", "done"),
    "running": ("cyan", "running"),
    "stopped": ("yellow", "stopped"),
    "user_error": ("red", "error in the job or its code"),
    "lost": ("red", "lost"),
}


def show_report(console: Console, report: Report, again: str = "") -> None:
    """Print the result of a run; `again` is the text that, added to the command, resumes it."""
    colour, state = _LOOKS.get(report.outcome, ("red", "failed"))
    rows: list[RenderableType] = [_summary_table(report)]
    if report.failures:
        rows += ["", "[dim]interrupted attempts[/]", _interruptions(report)]
    title = f"[bold]{escape(report.job)}[/] {escape(report.run)}: [bold {colour}]{state}[/]"
    panel = Panel(Group(*rows), title=title, title_align="left", border_style=colour, padding=(1, 2), expand=False)
    console.print(panel, soft_wrap=False)  # which would cut what does not fit
    for name in ("curves", "report", "metric log", "metric log so far", "best weights"):
        if name in report.files:
            console.print(f"{name:>17}  {escape(report.files[name])}", highlight=False, soft_wrap=True)
    if again:
        console.print(f"{'resume':>17}  the same command with {escape(again)}", soft_wrap=True)


def _summary_table(report: Report) -> Table:
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in summary_rows(report):
        good = name.startswith("test: ")
        table.add_row(escape(name), f"[bold]{escape(value)}[/]" if good else escape(value))
    return table


def _interruptions(report: Report) -> Table:
    """Return each interruption with its cause in full and its cost."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right")
    table.add_column(overflow="fold")
    for failure in report.failures:
        table.add_row(str(failure.attempt), f"{escape(failure.cause)}[dim]{_cost(failure)}[/]")
    return table


def _cost(failure: Interruption) -> str:
    lost = lost_steps(failure)
    clauses = [
        "" if failure.step is None else f"after step {failure.step}",
        "" if failure.resumed_step is None else f"went on from step {failure.resumed_step}",
        lost and f"steps lost: {lost}",
        "" if failure.seconds_lost is None else f"time lost: {format_seconds(failure.seconds_lost)}",
    ]
    said = ", ".join(filter(None, clauses))
    return f"\n{said}" if said else ""


def show_runs(console: Console, url: str, runs: Sequence[RunSummary], now: float) -> None:
    """Print the outcome of each run; `now` in seconds since the epoch."""
    columns = ("run", "job", "state", "step", "epoch", "best", "attempts", "last sign", "why it ended")
    texts = ("run", "job", "state", "why it ended")
    show_table(console, escape(url), columns, [_cells(run, now) for run in runs], texts=texts)


def _cells(run: RunSummary, now: float) -> list[str]:
    colour, state = _LOOKS.get(run.state, ("red", "failed"))
    return [
        escape(f"{run.name} (fork of {run.parent})" if run.parent else run.name),
        escape(run.job),
        f"[{colour}]{state}[/]",
        "" if run.step is None else f"{run.step:,}",
        "" if run.epoch is None else str(run.epoch),
        "" if run.best is None else f"{escape(run.best[0])} {format_number(run.best[1])}",
        str(run.attempts),
        "" if run.time is None else _age(now - run.time),
        escape(run.why),
    ]


def _age(age_s: float) -> str:
    return f"{format_seconds(max(0.0, age_s))} ago"
