"""Samples whose reading raises an error, left out of batches: `bad_samples: {skip: 20}`."""

from typing import Any, NamedTuple

from midstride.engine.errors import UserCodeError

__all__ = ["ON_REQUEST", "BadSample", "NoSampleLeft", "PartialBatch", "no_sample_left"]

#: takes the place of the error of a sample in `skip_samples`
ON_REQUEST = "on request"


class BadSample(NamedTuple):
    """A sample that could not be read.

    Args:
        sample: its index in the data set, as text.
        error: type and message of the error.
    """

    sample: str
    error: str


class NoSampleLeft(UserCodeError):
    """Raised on a rank whose batch has no readable sample; its loop tells the other ranks."""


class PartialBatch(NamedTuple):
    """A batch without its bad samples.

    Args:
        batch: the batch of the other samples; None if there are none.
        bad: the samples that could not be read.
    """

    batch: Any
    bad: tuple[BadSample, ...]


def no_sample_left(bad: tuple[BadSample, ...]) -> str:
    """Return a message for a batch whose samples are all bad."""
    if all(one.error == ON_REQUEST for one in bad):
        return f"skip_samples leaves out all {len(bad)} samples of a batch: skip it by skip_batches"
    return f"none of the {len(bad)} samples of a batch can be read; the first is {bad[0].sample}: {bad[0].error}"
