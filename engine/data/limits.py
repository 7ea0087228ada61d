"""How many batches a limit leaves: a share of a loader's batches, or a number of them."""

from midstride.engine.errors import UserError

__all__ = ["limited", "no_batch_left", "stream_limits"]


def limited(batches: int, limit: float) -> int:
    """Return how many of `batches` are read: a share of them, or a number."""
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


def no_batch_left(option: str, limit: float, batches: int | None) -> str:
    """Return why `option` leaves none of `batches`, and what to set instead.

    >>> no_batch_left("limit_val_batches", 0.5, 1)
    'limit_val_batches=0.5 of 1 batch leaves none (0.5, rounded down): give a number of batches, or 1.0 for all'
    """
    if not (limit and batches):
        return f"{option}={limit!r} leaves none"
    share = f"{option}={limit!r} of {batches} {'batch' if batches == 1 else 'batches'}"
    return f"{share} leaves none ({batches * limit:.2g}, rounded down): give a number of batches, or 1.0 for all"


def stream_limits(name: str, expected: int | None, limit: float) -> tuple[int | None, int | None]:
    """Return the batches to expect of an iterable loader, of which its data set says `expected`, and the most to read.

    Raises:
        UserError: a share of its batches is asked for, and how many there are is not known.
    """
    if isinstance(limit, int):
        return (limit if expected is None else min(expected, limit)), limit
    if limit in (0.0, 1.0):
        return (0, 0) if limit == 0.0 else (expected, None)
    if expected is None:
        raise UserError(
            f"{name}: a limit of {limit} is a share of its batches, and how many there are, only reading to "
            "the end tells. Give a number of batches, or 1.0 for all."
        )
    return limited(expected, limit), limited(expected, limit)
