"""Logged values of a run in lanes, kept per lane and merged in the order of lanes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from midstride.engine.lanes import Lanes
from midstride.engine.metrics.lane_metrics import LaneMetrics
from midstride.engine.metrics.logger import LoggingStage, LogRequest, MetricLogger, PendingValues
from midstride.engine.metrics.metric_log import MetricLog

__all__ = ["LaneLogger"]


class LaneLogger(MetricLogger):
    """A logger that acts as one logger per lane of this rank.

    Outside a lane, as in a hook, a value is logged for all lanes; in a hook of a batch, for the lanes that have one,
    each with the weight of its batch. Without a reduction, the value of lane 0 is used.

    Args:
        gather: returns every rank's copy of a value, in the order of ranks.
        metrics: the metrics of the module.
        lanes: the lanes of the run, and those of this rank.
    """

    metrics: LaneMetrics

    def __init__(self, gather: Callable[[object], list[Any]], metrics: LaneMetrics, lanes: Lanes) -> None:
        super().__init__(gather, metrics, lanes.count)
        self._lanes = lanes
        first, *others = lanes.own
        self._by_lane = {lane: PendingValues() for lane in others}
        rows = _LaneRows([values.rows for values in self._by_lane.values()])
        self._by_lane[first] = PendingValues(rows)
        self._lane: int | None = None
        self.pending = PendingValues(rows)

    @contextmanager
    def lane(self, lane: int) -> Iterator[None]:
        """Assign values and updates of metrics in the block to `lane` alone."""
        with self.metrics.lane(lane), self._in(lane), self._batch_of(lane):
            yield

    @contextmanager
    def _in(self, lane: int) -> Iterator[None]:
        outer = self._lane, self.pending
        self._lane, self.pending = lane, self._by_lane[lane]
        try:
            yield
        finally:
            self._lane, self.pending = outer

    @contextmanager
    def _batch_of(self, lane: int) -> Iterator[None]:
        """Assign values in the block to the lane's batch, if there are batches."""
        batches, weights = self.batch, self.weight
        if batches is not None:
            known = weights.get(lane) if isinstance(weights, Mapping) else None
            self.begin_batch(batches.get(lane), known)
        try:
            yield
        finally:
            self.begin_batch(batches, weights)

    def samples(self) -> int:
        """Return the number of samples of the current batches of all lanes of this rank."""
        if self._lane is not None:
            return super().samples()
        total = 0
        for lane in self.batch or ():
            with self._in(lane), self._batch_of(lane):
                total += super().samples()
        return total

    def log(self, asked: LogRequest, value: Any, batch_size: int | None) -> None:
        """Add one value to the running lane, or else to all lanes that have a batch."""
        if self._lane is not None:
            super().log(asked, value, batch_size)
            return
        for lane in self._lanes.own if self.batch is None else self.batch:  # lane -> its batch; None outside of batches
            with self._in(lane), self._batch_of(lane):
                super().log(asked, value, batch_size)

    def _gather_shares(self, share: Callable[[], Any]) -> list[Any]:
        """Return the result of `share` in every lane, in the order of lanes."""
        return self._lanes.by_lane(self._gather(self._lanes.each(self._in, share)))

    def _forget(self, stage: LoggingStage) -> None:
        self._lanes.each(self._in, partial(super()._forget, stage))

    def state_dict(self) -> dict[str, Any]:
        """Return the values that are not reduced yet, lane by lane."""
        return self._lanes.state_dict(self._in, super().state_dict)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the values of every lane."""
        self._lanes.load_state_dict(self._in, super().load_state_dict, state_dict)

    def resharded(self, states: Sequence[dict[str, Any]], rank: int) -> dict[str, Any]:
        """Return the values of the lanes of this rank, from the ranks that ran them before."""
        return self._lanes.resharded(states)


class _LaneRows(MetricLog):
    """The rows of a rank's first lane; the rows of its other lanes open and close with them.

    Args:
        others: the rows of the other lanes of the rank.
    """

    def __init__(self, others: Sequence[MetricLog]) -> None:
        super().__init__()
        self._others = others

    def step(self, epoch: int, step: int) -> None:
        """Close the open row, and open the row of `step`, in every lane."""
        super().step(epoch, step)
        for rows in self._others:
            rows.step(epoch, step)
            rows.drop_closed()

    def close(self) -> None:
        """Close the last row of every lane, because another rank can have the lane next."""
        super().close()
        for rows in self._others:
            rows.close()
            rows.drop_closed()

    def discard(self) -> None:
        """Drop the closed rows of every lane, for a run without a metric log."""
        super().discard()
        for rows in self._others:
            rows.discard()
