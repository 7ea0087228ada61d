"""Arguments of Lightning's Trainer in docs/lightning.md; `python -m unit.lightning.test_arguments` writes them."""

from collections.abc import Iterable
from inspect import signature
from pathlib import Path
from textwrap import wrap

import lightning as L

from midstride.engine import Trainer
from midstride.engine.config.lightning_names import LIGHTNING_OPTIONS, NEUTRAL_OPTIONS

PAGE = Path(__file__).parents[3] / "docs" / "lightning.md"
BEGIN, END = "## All arguments of Lightning's Trainer\n", "\n## Supported parts\n"


def _rows() -> list[str]:
    theirs = [name for name in signature(L.Trainer).parameters]
    ours = [name for name in theirs if name in signature(Trainer).parameters]
    others = [name for name in theirs if name not in ours]
    missing = [name for name in others if name not in LIGHTNING_OPTIONS or name not in NEUTRAL_OPTIONS]
    assert not missing
    free = [name for name in others if NEUTRAL_OPTIONS[name] is None]
    answered = {name: NEUTRAL_OPTIONS[name] or () for name in others if name not in free}
    return [
        *wrap(f"- taken: {_named(ours)}", 120, subsequent_indent="  "),
        *wrap(f"- taken, and without effect: {_named(free)}", 120, subsequent_indent="  "),
        "",
        "| others | taken if | else |",
        "|---|---|---|",
        *(f"| `{name}` | {_named(values)} | {LIGHTNING_OPTIONS[name]} |" for name, values in answered.items()),
    ]


def _named(values: Iterable[object]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def _section(page: str) -> tuple[str, str, str]:
    before, begin, rest = page.partition(BEGIN)
    section, end, after = rest.partition(END)
    assert begin
    assert end
    return before + begin, section, end + after


def test_the_page_answers_each_argument() -> None:
    assert _section(PAGE.read_text())[1].strip().splitlines() == _rows()


if __name__ == "__main__":
    before, _, after = _section(PAGE.read_text())
    PAGE.write_text(before + "\n" + "\n".join(_rows()) + "\n" + after)
