"""A world as a person sees it on a terminal: its output, a progress bar, and how it ended."""

from datetime import datetime
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from midstride.engine.errors import SnapshotError
from midstride.engine.events import Event
from midstride.engine.outcome import Outcome
from midstride.engine.snapshots.history import History, Snapshot

__all__ = ["WorldView", "show_error", "show_outcome", "show_snapshots"]


class WorldView:
    """Shows what a world prints, and how far it is; the bar only on a terminal.

    Pass `line` and `event` to `launch`.

    Args:
        console: where to; standard output by default.
        bar: whether a progress bar is wanted at all.
    """

    def __init__(self, console: Console | None = None, *, bar: bool = True) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not (bar and self.console.is_terminal),
        )
        self._task = self._progress.add_task("steps", total=None, epoch=0, facts="", visible=False)
        self._metrics = ""

    def __enter__(self) -> "WorldView":
        """Start to show."""
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away."""
        self._progress.stop()

    def line(self, text: str) -> None:
        """Show lines the world printed, as they are."""
        self.console.print(escape(text), highlight=False)

    def event(self, event: Event) -> None:
        """Show one event."""
        fields = event.fields
        if event.kind == "step":
            self._step(fields)
        elif event.kind == "validation":
            metrics = fields.get("metrics") or {}
            self._metrics = "  ".join(f"{name} {_number(value)}" for name, value in metrics.items())
        elif event.kind == "resumed" and fields.get("resumed_from"):
            self.console.print(f"resumed from snapshot {fields['resumed_from']}, step {fields.get('step')}")

    def _step(self, fields: dict[str, object]) -> None:
        rate = fields.get("rate")
        facts = [f"loss {_number(fields.get('loss'))}", f"{_number(rate)} steps/s" if rate else "", self._metrics]
        self._progress.update(
            self._task,
            completed=float(str(fields.get("step") or 0)),
            total=None if fields.get("steps_total") is None else float(str(fields["steps_total"])),
            epoch=fields.get("epoch", 0),
            facts="  ".join(filter(None, facts)),
            visible=True,
        )


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def show_outcome(outcome: Outcome) -> None:
    """Say how a world ended; an error goes to standard error, in one block."""
    if outcome.kind == "done":
        return
    if outcome.kind == "stopped":
        Console(stderr=True).print(f"[yellow]stopped[/] {escape(outcome.error)}\nRun the same command to resume.")
        return
    show_error(outcome.error)


def show_error(text: str) -> None:
    """Print an error in red on standard error."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, style="red", markup=False)


def show_snapshots(run: str, history: History, *, verify: bool = False) -> bool:
    """Print the snapshots of one run as a table; return whether all that count are good.

    Args:
        run: its name.
        history: its snapshots.
        verify: read every byte of them.
    """
    table = Table(title=run, title_justify="left")
    for column in ("snapshot", "step", "gen", "bytes", "taken", "state"):
        number = column in ("step", "gen", "bytes")
        table.add_column(column, justify="right" if number else "left", no_wrap=column != "state")
    good = True
    for snapshot in history.snapshots():
        state = _verified(history, snapshot) if verify else "committed"
        good = good and state in ("committed", "verified")
        facts = (str(snapshot.place.step), str(snapshot.generation), f"{snapshot.bytes:,}", _time(snapshot))
        table.add_row(snapshot.name, *facts, escape(state))
    for name, reason in history.aside():
        table.add_row(name, "", "", "", "", f"set aside: {escape(reason)}")
    # Into a pipe nothing is cut; on a terminal the reasons wrap.
    Console(width=None if Console().is_terminal else 160).print(table)
    return good


def _verified(history: History, snapshot: Snapshot) -> str:
    try:
        history.verify(snapshot)
    except SnapshotError as error:
        return f"damaged: {error}"
    return "verified"


def _time(snapshot: Snapshot) -> str:
    return datetime.fromtimestamp(snapshot.manifest["time"]).strftime("%m-%d %H:%M:%S")
