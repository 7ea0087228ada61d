"""Writes a local file through a draft. The path always holds the whole old or new file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["draft_of"]


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Yield a hidden path beside `path`. At the end of the block it replaces `path` atomically.

    If the block raises, the draft is removed and `path` is unchanged. Only one process can write a path at a time, and
    without an fsync the file can be lost in a power cut: `Store` has neither limit.
    """
    draft = path.with_name(f".{path.name}.draft")
    try:
        yield draft
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
