"""Pages of the documentation, as the tests read them."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if "runs" not in path.parts),  # reports of `make train`
]


def blocks(page: Path, language: str) -> Iterator[tuple[str, str]]:
    """Yield the code blocks of `language`: the name of the file that each is, or "", and its text."""
    fence = rf'^```{language}(?: title="([^"\n]+)")?\n(.*?)^```$'
    yield from re.findall(fence, page.read_text(), re.MULTILINE | re.DOTALL)


def command_lines(page: Path) -> Iterator[list[str]]:
    """Yield the words of every command line."""
    for _, block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def command_spans(page: Path, program: str) -> Iterator[list[str]]:
    """Yield the words of every command of `program` within a sentence."""
    for span in re.findall(rf"`({program} [^`\n]+)`", page.read_text()):
        yield shlex.split(span)
