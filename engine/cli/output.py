"""A world as a person sees it on a terminal: its output, a progress bar, and how it ended."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from midstride.engine.session.events import Event
from midstride.engine.session.outcome import Outcome

if TYPE_CHECKING:
    from midstride.engine.runs.audit import Audit, EpochAudit

__all__ = ["WorldView", "busy", "show_audit", "show_error", "show_outcome"]


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
        elif event.kind == "waiting":
            self._progress.update(self._task, facts=f"waiting for the store: {fields['waited_s']:.0f} s")
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


@contextmanager
def busy(text: str) -> Iterator[None]:
    """Show on a terminal that something takes a while; standard output is left to what was asked for."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(escape(text)):
        yield


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


def show_audit(run: str, audit: "Audit") -> None:
    """Print what each epoch of a run used, and every breach of law 3."""
    table = Table(title=run, title_justify="left")
    for column in ("epoch", "batches", "samples", "once", "repeated", "missing", "padding", "left over", "verdict"):
        table.add_column(column, justify="left" if column == "verdict" else "right", no_wrap=column != "verdict")
    for epoch in audit.epochs:
        table.add_row(*_epoch_cells(epoch), escape(_verdict(epoch)))
    console = Console(width=None if Console().is_terminal else 160, highlight=False)
    console.print(table)
    for fault in audit.faults:
        console.print(escape(fault), style="red")
    uncounted = [str(epoch.epoch) for epoch in audit.epochs if not epoch.is_counted]
    state = "law 3 holds" if audit.is_clean else "law 3 is broken"
    if audit.is_clean and uncounted:
        state = f"nothing breaks law 3, but the samples of epochs {', '.join(uncounted)} were not counted"
    console.print(f"up to snapshot {audit.snapshot}, {audit.rows} rows in the metric log: {state}")


def _epoch_cells(epoch: "EpochAudit") -> list[str]:
    cells = [str(epoch.epoch), str(epoch.batches)]
    if epoch.expected is None:
        return [*cells, f"{epoch.samples:,}", *"-----"]
    counts = (epoch.expected, epoch.once, epoch.repeated, epoch.missing, epoch.padding, epoch.left_over)
    return [*cells, *(f"{count:,}" for count in counts)]


def _verdict(epoch: "EpochAudit") -> str:
    left_out = f"; left out, loss not finite: batches {', '.join(map(str, epoch.left_out))}" if epoch.left_out else ""
    if epoch.faults:
        return "; ".join(epoch.faults) + left_out
    over = "" if epoch.is_over else ", under way"
    if not epoch.is_counted:
        return "each batch once, samples not counted" + over + left_out
    return ("as its sampler gave them" if epoch.expected is None else "each sample once") + over + left_out
