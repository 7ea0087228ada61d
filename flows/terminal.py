"""A flow as a person sees it on a terminal: one bar while it runs, one panel when it ends."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table

from midstride.engine.cli.table import escape
from midstride.engine.formatting import format_number
from midstride.engine.registry.comparison import PromotionDecision
from midstride.engine.registry.night_report import NightlyReport
from midstride.engine.session.terminal_view import TerminalView

__all__ = ["FlowView", "quiet_prefect", "show_nightly_report"]

#: settings of Prefect under this command, unless the user has others
_DEFAULTS = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",  # the first start makes a database: 20 to 30 s
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # its story is told by the bar and the panel
    "PREFECT_INTERNAL_LOGGING_LEVEL": "CRITICAL",
}


def quiet_prefect() -> None:
    """Reduce Prefect's output to the essential. Call this before its import."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


class FlowView(TerminalView):
    """Shows the worlds of one flow.

    Args:
        console: where to.
        bar: whether a progress bar is wanted.
    """

    @contextmanager
    def busy(self, text: str) -> Iterator[None]:
        """Show that something takes a while."""
        if self.console.is_terminal:
            with self.console.status(text):
                yield
        else:
            self.console.print(text)
            yield


def show_nightly_report(console: Console, report: NightlyReport) -> None:
    """Print the result of a night: decision, both tests, champion."""
    rows: list[RenderableType] = [escape(report.verdict)]
    if report.decision:
        rows += ["", _tests(report.decision)]
    promoted = report.decision is not None and report.decision.promoted
    title = f"[bold]{escape(report.job)}[/] {report.date}: [bold]{'promoted' if promoted else 'champion kept'}[/]"
    style = "green" if promoted else "none"
    panel = Panel(Group(*rows), title=title, title_align="left", border_style=style, padding=(1, 2), expand=False)
    console.print(panel, soft_wrap=False)  # which would cut long lines
    if report.champion:
        console.print(f"{'champion':>12}  {escape(report.weights)}", highlight=False, soft_wrap=True)
    has_one_before = report.decision is not None and promoted and report.decision.over is not None
    if has_one_before and report.in_charge:
        store = report.url.rpartition("/")[0]
        console.print(f"{'go back':>12}  midstride champion rollback {escape(store)}", highlight=False, soft_wrap=True)


def _tests(decision: PromotionDecision) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for column in ("test", "challenger", "champion"):
        table.add_column(column, justify="left" if column == "test" else "right", overflow="fold")
    for name in sorted({*decision.challenger, *decision.champion}):
        both = [values.get(name) for values in (decision.challenger, decision.champion)]
        table.add_row(escape(name), *("" if value is None else format_number(value) for value in both))
    return table
