"""Arguments of Lightning's Trainer, as the site lists them in docs/lightning.md."""

import re
import runpy
from inspect import signature
from pathlib import Path

import lightning as L

from midstride.engine import Trainer

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_answers_each_argument() -> None:
    assert "<!-- reference: lightning -->" in (DOCS / "lightning.md").read_text()
    text = str(runpy.run_path(str(DOCS / "hooks/reference.py"))["lightning"]())
    taken, free, *rows = [line for line in text.splitlines() if line]
    answered = [row[1] for row in (re.fullmatch(r"\| `(\w+)` \| .+ \| .+ \|", line) for line in rows) if row]
    named = [re.findall(r"`(\w+)`", line) for line in (taken, free)]
    assert set(named[0]) <= {*signature(Trainer).parameters}
    assert sorted([*named[0], *named[1], *answered]) == sorted(signature(L.Trainer).parameters)
