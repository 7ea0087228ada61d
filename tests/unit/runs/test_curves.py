"""Curves are drawn of whatever names there are, and a run does not end otherwise where they cannot be."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from midstride.engine.runs import report_files
from midstride.engine.runs.curves import draw

ROWS = [
    {"epoch": "0", "step": str(step), "train/loss_$x^$": "0.5", "val/a_b\\": str(step), "_own": "1"} for step in (1, 2)
]


@pytest.mark.parametrize("marks", [[], [1]])
def test_names_are_drawn_as_they_are(marks: list[int]) -> None:
    picture = draw(ROWS, "50 $ a night, $x^$", marks=marks)
    assert picture is not None
    assert picture.startswith(b"\x89PNG")


def test_the_same_curves_are_drawn_once() -> None:
    first = draw(ROWS, "one")
    assert draw(ROWS, "one") is first
    more = [*ROWS, {**ROWS[1], "step": "3"}]
    assert len({first, draw(more, "one"), draw(ROWS, "two"), draw(ROWS, "one", marks=[1])}) == 4


@pytest.mark.parametrize("panels", [3, 5])
def test_a_place_without_a_curve_is_blank(panels: int) -> None:
    rows = [{"step": str(step), **{f"v{panel}": "1.5" for panel in range(panels)}} for step in (1, 2)]
    picture = Image.open(io.BytesIO(draw(rows, "") or b"")).convert("L")
    width, height = picture.size
    rows_of_panels = (panels + 1) // 2
    last = picture.crop((width // 2 + 8, height * (rows_of_panels - 1) // rows_of_panels + 20, width, height))
    assert not sum(last.histogram()[:200])


def test_curves_that_cannot_be_drawn_are_told_of(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no font")

    monkeypatch.setattr(report_files, "draw", fail)
    monkeypatch.setattr(report_files, "metric_rows", lambda _: ROWS)
    run: Any = SimpleNamespace(store=None, name="first", job=SimpleNamespace(name="digits"))
    report: Any = SimpleNamespace(failures=())
    assert report_files.curves_of(run, report) is None
    assert "the curves of first could not be drawn: ValueError: no font" in caplog.text
