"""Prints the end of a run, and an audit."""

import itertools
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from pydantic_core import to_json
from rich.console import Console

from midstride.engine.cli.table import escape, show_table, table_console
from midstride.engine.formatting import printable
from midstride.engine.session.outcome import Outcome

if TYPE_CHECKING:
    from midstride.engine.runs.audit import Audit, EpochAudit

__all__ = [
    "AsJson",
    "busy",
    "print_json",
    "reader_has_gone",
    "say_stage",
    "say_stopping",
    "show_audit",
    "show_error",
    "show_outcome",
    "surroundings_fault",
]


AsJson = Annotated[bool, Parameter(name="--json", help="Print JSON, for programs.", negative=())]


@contextmanager
def busy(text: str) -> Iterator[None]:
    """Show on a terminal that something takes a while; standard output stays free."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(escape(text)):
        yield


def say_stage(text: str) -> None:
    """Print the current stage of a command as one line on a terminal."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def say_stopping(number: int, *, again: bool) -> None:
    """Say at once that signal `number` was heard; `again`: and that nothing is awaited now.

    For handlers of signals.
    """
    line = "\r\x1b[2K" if os.isatty(2) else "\n"  # in place of a progress bar
    name = signal.Signals(number).name
    what = " again: ending at once" if again else ": stopping, after a last snapshot if there is anything to keep"
    os.write(2, f"{line}{name}{what}\n".encode())


def reader_has_gone() -> bool:
    """Return whether standard output is closed, as in `midstride report | head`."""
    poll = select.poll()
    try:
        poll.register(sys.stdout, 0)
    except (OSError, ValueError):  # it is closed, or no file
        return False
    return any(flags & select.POLLERR for _, flags in poll.poll(0))


def surroundings_fault() -> str:
    """Return the reason why no command works here, or "".

    The folder was removed, or standard output takes no more.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        return "the current folder has been removed: change to an existing one"
    try:
        os.write(1, b"\n")  # Python drops buffered output that it cannot write
    except OSError as error:
        return f"standard output takes no more ({error.strerror}): further output is dropped"
    return ""


def print_json(value: Any) -> None:
    """Print `value` as JSON, which has no number that is not finite: null stands in its place."""
    print(to_json(value, indent=1, inf_nan_mode="null").decode())


def show_outcome(outcome: Outcome) -> None:
    """Say how a world ended; an error goes to standard error, in one block."""
    if outcome.kind == "done":
        return
    if outcome.kind == "stopped":
        Console(stderr=True).print(f"[yellow]stopped[/] {escape(outcome.error)}\nRun the same command to resume.")
        return
    show_error(outcome.error)


def show_error(text: str) -> None:
    """Print an error in red on standard error; a terminal wraps between words."""
    console = Console(stderr=True, highlight=False)
    console.print(printable(text), style="red", markup=False, soft_wrap=not console.is_terminal)


def show_audit(run: str, audit: "Audit") -> None:
    """Print the samples of each epoch of a run, equal epochs in one line, and every fault."""
    columns = ("epoch", "batches", "samples", "once", "repeated", "missing", "padding", "left over", "verdict")
    rows = []
    for cells, epochs in itertools.groupby(audit.epochs, lambda epoch: (*_epoch_cells(epoch), escape(_verdict(epoch)))):
        first, *others = [epoch.epoch for epoch in epochs]
        rows.append((f"{first} to {others[-1]}" if others else str(first), *cells))
    console = table_console()
    show_table(console, escape(run), columns, rows, texts=("epoch", "verdict"))
    for fault in audit.faults:
        console.print(escape(fault), style="red")
    for bad in audit.bad_samples:
        console.print(escape(bad), style="yellow")
    uncounted = [str(epoch.epoch) for epoch in audit.epochs if not epoch.is_counted]
    state = "each sample was used once" if audit.is_clean else "samples or rows are wrong"
    if audit.is_clean and uncounted:
        state = f"no fault found, but the samples of epochs {', '.join(uncounted)} were not counted"
    origin = f" (fork of {escape(audit.parent)})" if audit.parent else ""
    console.print(f"up to snapshot {audit.snapshot}, {audit.rows} rows in the metric log{origin}: {state}")


def _epoch_cells(epoch: "EpochAudit") -> list[str]:
    cells = [str(epoch.batches)]
    if epoch.expected is None:
        return [*cells, f"{epoch.samples:,}", *"-----"]
    counts = (epoch.expected, epoch.once, epoch.repeated, epoch.missing, epoch.padding, epoch.left_over)
    return [*cells, *(f"{count:,}" for count in counts)]


def _verdict(epoch: "EpochAudit") -> str:
    left_out = f"; left out, loss not finite: batches {', '.join(map(str, epoch.left_out))}" if epoch.left_out else ""
    left_out += f"; skipped on request: batches {', '.join(map(str, epoch.skipped))}" if epoch.skipped else ""
    if epoch.faults:
        return "; ".join(epoch.faults) + left_out
    over = "" if epoch.is_over else ", in progress"
    if not epoch.is_counted:
        return "each batch once, samples not counted" + over + left_out
    return ("each sample as it was given" if epoch.expected is None else "each sample once") + over + left_out
