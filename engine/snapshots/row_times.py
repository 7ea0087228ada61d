"""Times of a run's steps: a few anchors and interpolation between them. Needs no torch."""

from bisect import bisect_left
from collections.abc import Iterable
from operator import itemgetter

__all__ = ["RowTimes"]

#: anchors above which every second one is dropped
_MOST = 256


class RowTimes:
    """The times of the rows of a metric log.

    Args:
        anchors: step and time, in seconds since the epoch, in the order of time.

    >>> times = RowTimes([(0, 100.0), (10, 120.0), (10, 500.0), (12, 504.0)])  # with a pause after step 10
    >>> [times.of(step) for step in (0, 5, 10, 11, 99)]
    [100.0, 110.0, 120.0, 502.0, 504.0]
    """

    def __init__(self, anchors: Iterable[tuple[int, float]] = ()) -> None:
        self.anchors: list[tuple[int, float]] = []
        self.take(anchors)

    def note(self, step: int, time: float) -> None:
        """Note that `step` was done by `time`; remove anchors of later steps after a rollback."""
        kept = [anchor for anchor in self.anchors if anchor[0] <= step]
        if len(kept) >= _MOST:
            kept = [*kept[:-1:2], kept[-1]]
        self.anchors = [*kept, (step, time)]

    def take(self, anchors: Iterable[tuple[int, float]]) -> None:
        """Take the anchors of a newer snapshot."""
        self.anchors = [(int(step), float(time)) for step, time in anchors]

    def of(self, step: int) -> float:
        """Return the time of `step`; that of the nearest anchor outside of them, and 0 without any."""
        if not self.anchors:
            return 0.0
        at = bisect_left(self.anchors, step, key=itemgetter(0))
        if at == len(self.anchors):
            return self.anchors[-1][1]
        (later, until) = self.anchors[at]
        if at == 0 or later == step:
            return until
        (earlier, since) = self.anchors[at - 1]
        return since + (until - since) * (step - earlier) / (later - earlier)
