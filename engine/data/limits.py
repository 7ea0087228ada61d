"""Limits on the number of batches: a share of a loader's batches, or a number."""

from midstride.engine.errors import UserError

__all__ = ["limited", "no_batch_left", "stream_limits"]


def limited(batches: int, limit: float) -> int:
    """Return the number of `batches` to read: an int `limit`, or that share rounded down."""
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


def no_batch_left(option: str, limit: float, batches: int | None) -> str:
    """Return why `option` leaves none of `batches`, and a better value, as text.

    >>> no_batch_left("limit_val_batches", 0.5, 1)
    'limit_val_batches=0.5 of 1 batch leaves none (0.5, rounded down): give a number of batches, or 1.0 for all'
    """
    if not limit and option == "limit_train_batches":
        return f"{option}={limit!r} leaves none; trainer.validate and trainer.test evaluate without training"
    if not (limit and batches):
        return f"{option}={limit!r} leaves none"
    share = f"{option}={limit!r} of {batches} {'batch' if batches == 1 else 'batches'}"
    return f"{share} leaves none ({batches * limit:.2g}, rounded down): give a number of batches, or 1.0 for all"


def stream_limits(name: str, expected: int | None, limit: float) -> tuple[int | None, int | None]:
    """Return an iterable loader's expected and largest number of batches; None if unknown.

    Args:
        name: the loader, in messages.
        expected: number of batches without a limit, according to its data set; None if unknown.
        limit: share of the batches, or number of batches.

    Raises:
        UserError: the limit is a share of an unknown number of batches.
    """
    if isinstance(limit, int):
        return (limit if expected is None else min(expected, limit)), limit
    if limit in (0.0, 1.0):
        return (0, 0) if limit == 0.0 else (expected, None)
    if expected is None:
        raise UserError(
            f"{name}: a limit of {limit} is a share of its batches, whose number is unknown until they are read. "
            f"Give a number of batches, or 1.0 for all."
        )
    return limited(expected, limit), limited(expected, limit)
