"""Pages of the documentation, as the tests read them."""

import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["blocks"]


def blocks(page: Path, language: str) -> Iterator[tuple[str, str]]:
    """Yield the code blocks of `language`: the name of the file that each is, or "", and its text."""
    fence = rf'^```{language}(?: title="([^"\n]+)")?\n(.*?)^```$'
    yield from re.findall(fence, page.read_text(), re.MULTILINE | re.DOTALL)
