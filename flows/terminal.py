"""A flow as a person sees it on a terminal: one bar while it runs, one panel when it ends."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from midstride.engine.formatting import format_number, format_seconds
from midstride.engine.registry.comparison import PromotionDecision
from midstride.engine.registry.report import NightReport
from midstride.engine.runs.markdown import facts_of, lost_steps
from midstride.engine.runs.report import Report
from midstride.engine.session.terminal_view import TerminalView

__all__ = ["FlowView", "quiet_prefect", "show_night", "show_report"]

#: what Prefect should do under this command, unless the user has said something else
_DEFAULTS = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",  # the first start makes a database: 20 to 30 s
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # its story is told by the bar and the panel
    "PREFECT_INTERNAL_LOGGING_LEVEL": "CRITICAL",
}
_LOOKS = {
    "done": ("green", "done"),
    "stopped": ("yellow", "stopped"),
    "user_error": ("red", "error in the job or its code"),
}


def quiet_prefect() -> None:
    """Have Prefect say what a person needs and nothing more; before it is imported."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


class FlowView(TerminalView):
    """Shows the worlds of one flow.

    Args:
        console: where to.
        bar: whether a progress bar is wanted.
    """

    url: str = ""

    def begin(self, url: str) -> None:
        """Say which run it is: its name is what resumes it."""
        if not self.url:
            self.console.print(f"run [bold]{escape(url.rpartition('/')[2])}[/] in {escape(url)}")
        self.url = url

    @contextmanager
    def busy(self, text: str) -> Iterator[None]:
        """Show that something takes a while."""
        if self.console.is_terminal:
            with self.console.status(text):
                yield
        else:
            self.console.print(text)
            yield


def show_report(console: Console, report: Report, again: str = "") -> None:
    """Print the panel a flow ends with; `again` is what, added to the command, resumes a flow that is not done."""
    colour, words = _LOOKS.get(report.outcome, ("red", "failed"))
    parts: list[RenderableType] = [_facts(report)]
    if report.failures:
        parts += ["", _interruptions(report)]
    title = f"[bold]{escape(report.job)}[/] {escape(report.run)}: [bold {colour}]{words}[/]"
    panel = Panel(Group(*parts), title=title, title_align="left", border_style=colour, padding=(1, 2), expand=False)
    console.print(panel)
    for name in ("curves", "report", "best weights"):
        if name in report.files:
            console.print(f"{name:>12}  {escape(report.files[name])}", highlight=False, soft_wrap=True)
    if again:
        console.print(f"{'resume':>12}  the same command with {escape(again)}", soft_wrap=True)


def show_night(console: Console, report: NightReport) -> None:
    """Print what a night came to: the decision, both tests, the champion."""
    parts: list[RenderableType] = [escape(report.words)]
    if report.decision:
        parts += ["", _tests(report.decision)]
    promoted = report.decision is not None and report.decision.promoted
    title = f"[bold]{escape(report.job)}[/] {report.date}: [bold]{'promoted' if promoted else 'champion kept'}[/]"
    style = "green" if promoted else "none"
    console.print(
        Panel(Group(*parts), title=title, title_align="left", border_style=style, padding=(1, 2), expand=False)
    )
    if report.champion:
        console.print(f"{'champion':>12}  {escape(report.weights)}", highlight=False, soft_wrap=True)
    if promoted:
        store = report.url.rpartition("/")[0]
        console.print(f"{'go back':>12}  midstride champion rollback {escape(store)}", highlight=False, soft_wrap=True)


def _tests(decision: PromotionDecision) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for column in ("test", "challenger", "champion"):
        table.add_column(column, justify="left" if column == "test" else "right")
    for name in sorted({*decision.challenger, *decision.champion}):
        both = [values.get(name) for values in (decision.challenger, decision.champion)]
        table.add_row(escape(name), *("" if value is None else format_number(value) for value in both))
    return table


def _facts(report: Report) -> Table:
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim")
    for name, value in facts_of(report):
        good = name.startswith("test: ")
        table.add_row(name, f"[bold]{value}[/]" if good else value)
    return table


def _interruptions(report: Report) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("interrupted by", "at step", "went on from", "steps lost", "time lost"):
        table.add_column(column, justify="left" if column == "interrupted by" else "right")
    for failure in report.failures:
        table.add_row(
            escape(failure.cause),
            "" if failure.step is None else str(failure.step),
            "" if failure.resumed_step is None else str(failure.resumed_step),
            lost_steps(failure),
            format_seconds(failure.seconds_lost),
        )
    return table
