"""The curves of a run as a picture, where matplotlib is installed."""

import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

__all__ = ["draw", "draw_runs"]

_PANELS = 6
_COLOURS = {"train": "#4477aa", "val": "#ee6677", "test": "#228833"}
_MARK_UP_TO = 40  # points up to which each is worth a mark
#: panel -> curve -> its points
_Panels = dict[str, dict[str, list[tuple[int, float]]]]
_SMOOTH_FROM = 60  # points from which the noise of single steps hides the line
#: digest of what a picture shows -> the picture: the page at the end of a world and the report after it show the same
_drawn: dict[bytes, bytes] = {}
_KEPT = 8


def _can_draw() -> bool:
    """Whether pictures can be drawn here."""
    return find_spec("matplotlib") is not None


def draw_runs(rows: Mapping[str, Sequence[Mapping[str, str]]]) -> bytes | None:
    """Return a PNG with a panel per logged value and a curve per run; None as for `draw`.

    Args:
        rows: name of a run -> rows of its metric log.
    """
    panels: _Panels = {}
    for run, its_rows in rows.items():
        for curves in _panels(its_rows).values():
            for name, points in curves.items():
                panels.setdefault(name, {})[run] = points
    if not panels or not _can_draw():
        return None
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False}):
        return _png(dict([*panels.items()][:_PANELS]), " and ".join(rows), ())


def draw(rows: Sequence[Mapping[str, str]], title: str, marks: Sequence[int] = ()) -> bytes | None:
    """Return the logged values over the steps as a PNG; None without matplotlib or values.

    Values that share a last name (train/loss, val/loss) share a panel.

    Args:
        rows: of the metric log.
        title: of the picture.
        marks: steps at which the run resumed.
    """
    panels = _panels(rows)
    if not panels or not _can_draw():
        return None
    shown = hashlib.sha256(repr((panels, title, [*marks])).encode()).digest()
    if (picture := _drawn.get(shown)) is None:
        from matplotlib import rc_context

        with rc_context({"text.parse_math": False}):  # a dollar in a name is one
            picture = _png(panels, title, marks)
        if len(_drawn) >= _KEPT:
            _drawn.clear()
        _drawn[shown] = picture
    return picture


def _png(panels: _Panels, title: str, marks: Sequence[int]) -> bytes:
    from matplotlib.figure import Figure

    columns = min(len(panels), 2)
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(5.2 * columns, 3.0 * lines + 0.4), layout="constrained")
    figure.suptitle(title, fontsize=11)
    grid = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes, (name, curves) in zip(grid, panels.items(), strict=False):
        _panel(axes, name, curves, marks)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()


def _panels(rows: Sequence[Mapping[str, str]]) -> _Panels:
    """Return the points of each curve, by panel and name."""
    panels: _Panels = {}
    for row in rows:
        for name, text in row.items():
            if name not in ("epoch", "step") and text and math.isfinite(float(text)):
                curves = panels.setdefault(name.rpartition("/")[2], {})
                curves.setdefault(name, []).append((int(row["step"]), float(text)))
    return dict(list(panels.items())[:_PANELS])


def _panel(axes: Any, name: str, curves: Mapping[str, Sequence[tuple[int, float]]], marks: Sequence[int]) -> None:
    for label, points in curves.items():
        steps, values = zip(*points, strict=True)
        colour = _COLOURS.get(label.partition("/")[0])
        many = len(points) >= _SMOOTH_FROM
        marker = "o" if len(points) <= _MARK_UP_TO else None
        (line,) = axes.plot(
            steps,
            values,
            color=colour,
            linewidth=1.0 if many else 1.4,
            alpha=0.3 if many else 1.0,
            marker=marker,
            markersize=3,
        )
        if many:
            axes.plot(steps, _smooth(values), color=line.get_color(), linewidth=1.6)
        line.set_label("_" if many else label)
        # matplotlib shows no label that starts with an underscore: a space without a width goes before it.
        axes.lines[-1].set_label(f"\u200b{label}")
    for index, step in enumerate(marks):
        axes.axvline(step, color="#bbbbbb", linestyle="--", linewidth=0.9, label="resumed" if index == 0 else None)
    axes.set_title(name, fontsize=10)
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)


def _smooth(values: Sequence[float]) -> list[float]:
    """A moving mean that starts without a lag."""
    width = max(2, len(values) // 30)
    smooth, total = [], 0.0
    for index, value in enumerate(values):
        total += value - (values[index - width] if index >= width else 0.0)
        smooth.append(total / min(index + 1, width))
    return smooth
