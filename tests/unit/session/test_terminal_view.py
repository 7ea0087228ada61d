"""A world on a terminal: a bar of one line at any width, in which nothing is cut; output that is read no more."""

import io
import os
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from midstride.engine.session.events import Event
from midstride.engine.session.terminal_view import TerminalView

METRICS = {"val/loss": 0.0742, "val/accuracy": 0.97}
STEP = {"epoch": 55, "step": 1150, "steps_total": 1200, "loss": 0.0156, "rate": 333.2}


@pytest.mark.parametrize(
    ("width", "chosen", "told"),
    [
        (60, {}, "loss 0.0156"),
        (80, {}, "loss 0.0156  val/loss 0.0742"),
        (120, {}, "loss 0.0156  val/loss 0.0742  val/accuracy 0.97  333.2 steps/s"),
        (80, {"right": 0.5}, "right 0.5  val/loss 0.0742"),
    ],
)
def test_what_fits_is_told_whole(width: int, chosen: dict[str, float], told: str) -> None:
    file = io.StringIO()
    with TerminalView(Console(width=width, file=file, force_terminal=True, color_system=None)) as view:
        view.begin("runs/first")
        view.event(Event("validation", 0.0, {"step": 1150, "epoch": 55, "metrics": METRICS}))
        view.event(Event("step", 0.0, {**STEP, "metrics": chosen}))
    lines = re.split(r"\r|\n|\x1b\[[0-9;?]*[A-Za-z]", file.getvalue())
    bars = [line.rstrip() for line in lines if "1150/1200" in line]
    assert bars
    for bar in bars:
        assert re.fullmatch(rf"epoch 55 \S+ +1150/1200 {told} +[-0-9:]+", bar), bar
        assert len(bar) <= width - len("^C"), "a terminal's ^C would begin a line"


def test_a_reader_that_goes_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", buffering=1) as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        with TerminalView() as view:
            view.begin("runs/first")
            view.line("rank 0 says something")
        print("and this is written nowhere")
        assert os.path.samestat(os.fstat(unread.fileno()), Path(os.devnull).stat())


def test_a_full_disk_ends_no_training(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    with Path("/dev/full").open("w", buffering=1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        with TerminalView() as view:
            view.begin("runs/first")
            view.line("rank 0 says something")
    assert capfd.readouterr().err == (
        "standard output takes no more (No space left on device): further output is dropped\n"
    )


def test_what_an_encoding_does_not_have_is_escaped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w", encoding="latin-1") as log:
        monkeypatch.setattr(sys, "stdout", log)
        with TerminalView() as view:
            view.line("déjà → vu")
    assert (tmp_path / "log").read_bytes() == "déjà \\u2192 vu\n".encode("latin-1")


def test_where_no_bar_is_shown_each_validation_has_a_line() -> None:
    file = io.StringIO()
    with TerminalView(Console(file=file, force_terminal=False)) as view:
        view.event(Event("validation", 0.0, {"step": 1200, "epoch": 55, "metrics": METRICS}))
    assert file.getvalue() == "validation at step 1,200, epoch 55: val/loss 0.0742, val/accuracy 0.97\n"
