"""A world on a terminal: its output, and a progress bar."""

import os
import sys
from types import TracebackType
from typing import IO, Any, TextIO, cast

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from midstride.engine.session.events import Event

__all__ = ["LastingOutput", "TerminalView"]

#: kind of an event -> what comes next
_STARTING = {
    "imported": "the processes meet",
    "met": "setting up",
    "started": "the first step",
}


class LastingOutput:
    """Standard output; after an error the rest is dropped, which standard error says once.

    An error comes when its reader has ended, its disk is full or its terminal is closed. A character that is not in
    its encoding is written as an escape.
    """

    def __init__(self) -> None:
        self._stream: TextIO = sys.stdout
        self.encoding = self._stream.encoding

    def write(self, text: str) -> int:
        """Write `text`, as far as that is possible."""
        try:
            try:
                return self._stream.write(text)
            except UnicodeEncodeError:
                return self._stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        """Write the lines that were kept back."""
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def isatty(self) -> bool:
        """Return whether this is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the file descriptor of standard output."""
        return self._stream.fileno()

    def _give_up(self, error: OSError) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        if not isinstance(error, BrokenPipeError):
            why = f"standard output takes no more ({error.strerror}): further output is dropped\n"
            os.write(2, why.encode())


class TerminalView:
    """Shows a world's output and progress; the bar only on a terminal.

    Pass `line` and `event` to `launch`.

    Args:
        console: where to; standard output by default.
        bar: whether a progress bar is wanted at all.
    """

    def __init__(self, console: Console | None = None, *, bar: bool = True) -> None:
        self.console = console or Console(file=cast("IO[str]", LastingOutput()), highlight=False, soft_wrap=True)
        self._bar_width = max(10, min(40, self.console.width // 5))
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=self._bar_width),
            MofNCompleteColumn(),
            TextColumn("{task.fields[details]}"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not (bar and self.console.is_terminal),
        )
        self._task = self._progress.add_task("steps", total=None, epoch=0, details="", visible=False)
        self._validated: list[str] = []
        self.url = ""

    def __enter__(self) -> "TerminalView":
        """Start to show."""
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away."""
        self._progress.stop()

    def begin(self, url: str) -> None:
        """Say which run it is, whose name resumes it, and show that its processes are starting."""
        if url != self.url:
            self.console.print(f"run [bold]{escape(url.rpartition('/')[2])}[/] in {escape(url)}")
        self.url = url
        self._progress.update(self._task, details="starting the processes", visible=True)

    def line(self, text: str) -> None:
        """Show lines the world printed, as they are."""
        self.console.print(escape(text), highlight=False, soft_wrap=not self.console.is_terminal)

    def event(self, event: Event) -> None:
        """Show one event."""
        fields = event.fields
        if event.kind == "step":
            self._step(fields)
        elif event.kind in _STARTING:
            self._progress.update(self._task, details=_STARTING[event.kind])
        elif event.kind == "validation":
            self._validated = _named(fields.get("metrics"))
            if not self.console.is_terminal:  # where no bar shows them
                self.line(
                    f"validation at step {fields['step']:,}, epoch {fields['epoch']}: {', '.join(self._validated)}"
                )
        elif event.kind == "waiting":
            self._progress.update(self._task, details=f"waiting for the store: {fields['waited_s']:.0f} s")
        elif event.kind == "resumed" and fields.get("resumed_from"):
            self.console.print(f"resumed from snapshot {fields['resumed_from']}, step {fields.get('step')}")

    def _step(self, fields: dict[str, object]) -> None:
        rate, total = fields.get("rate"), fields.get("steps_total")
        chosen = _named(fields.get("metrics")) or _named({"loss": fields.get("loss")})
        details = [*chosen, *self._validated, f"{_number(rate)} steps/s" if rate else ""]
        # What stands beside them: names, counts, the time, spaces, and room for the terminal's ^C.
        room = self.console.width - self._bar_width - len(f"epoch {fields.get('epoch')}{total}{total}") - 18
        self._progress.update(
            self._task,
            completed=float(str(fields.get("step") or 0)),
            total=None if total is None else float(str(total)),
            epoch=fields.get("epoch", 0),
            details=_that_fit(details, room),
            visible=True,
        )


def _that_fit(texts: list[str], room: int) -> str:
    """Return the first of `texts` that fit whole in a line of `room` characters."""
    line = ""
    for text in filter(None, texts):
        longer = f"{line}  {text}" if line else text
        if len(longer) > room:
            break
        line = longer
    return line


def _named(values: Any) -> list[str]:
    return [f"{name} {_number(value)}" for name, value in (values or {}).items()]


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
