"""A local file that is written beside its place, so that what stands there is whole, or the one before."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["draft_of"]


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Yield a hidden path to write to, beside `path`; what is there when the block ends replaces `path`, in one step.

    If the block raises, the draft is removed and `path` stays as it was. One process writes a path at a time, and no
    fsync makes it last: a `Store` is for files that several write, or that outlive a machine.
    """
    draft = path.with_name(f".{path.name}.draft")
    try:
        yield draft
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
