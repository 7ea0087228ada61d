"""torchmetrics of a run in lanes. States are kept per lane and merged in the order of lanes."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

from midstride.engine.errors import NotExact
from midstride.engine.lanes import Lanes
from midstride.engine.metrics.torchmetrics_internals import exchanges_itself, link_groups, seen_by
from midstride.engine.metrics.torchmetrics_state import TorchmetricsState

__all__ = ["LaneMetrics"]


class LaneMetrics(TorchmetricsState):
    """Metrics with one state per lane of this rank.

    Args:
        module: the module with the metrics.
        gather: returns every rank's copy of a value.
        lanes: the lanes of the run, and those of this rank.

    Raises:
        NotExact: a metric exchanges states between ranks itself.
    """

    def __init__(self, module: nn.Module, gather: Callable[[object], list[Any]], lanes: Lanes) -> None:
        self._lanes = lanes
        self._lane: int | None = None
        #: state of each metric, by lane and path
        self._seen: dict[int, Any] = {}
        super().__init__(module, gather, lanes.count)
        unseen = {path: seen_by(metric) for path, metric in self._metrics.items()}
        self._seen = {lane: copy.deepcopy(unseen) for lane in lanes.own}
        self._unseen = unseen

    def _adopt(self, metrics: Mapping[str, Any]) -> None:
        super()._adopt(metrics)
        for path, metric in metrics.items():
            if self._seen:
                raise NotExact(
                    f"lanes with the metric {path}, a {type(metric).__name__} that was added after setup: its states "
                    "cannot be told apart by lane. Make it in __init__ or setup."
                )
            if self._lanes.count > 1 and exchanges_itself(metric):
                raise NotExact(
                    f"lanes with the metric {path}, a {type(metric).__name__}: it exchanges its state with other ranks "
                    "itself, without the lanes of one rank. Log its value, or leave lanes out."
                )
            self._follow_resets(path, metric)

    def _follow_resets(self, path: str, metric: Any) -> None:
        """Apply a reset outside a lane to all lanes."""
        reset = metric.reset

        def reset_lanes(_: Any) -> None:
            reset()
            if self._lane is None:
                for seen in self._seen.values():
                    seen[path] = copy.deepcopy(self._unseen[path])

        metric.reset = MethodType(reset_lanes, metric)

    @contextmanager
    def lane(self, lane: int) -> Iterator[None]:
        """Give the metrics the state of `lane` in the block."""
        if not self._metrics:
            yield
            return
        outer, self._lane = self._lane, lane
        self._load_seen(self._seen[lane])
        try:
            yield
        finally:
            self._seen[lane] = {path: seen_by(metric) for path, metric in self._metrics.items()}
            self._lane = outer

    def _load_seen(self, seen: dict[str, dict[str, Any]]) -> None:
        """Give every metric its state in `seen`, by path."""
        for path, metric in self._metrics.items():
            vars(metric).update(seen[path])
        for collection in self._collections.values():
            link_groups(collection)

    def _gather_shares(self, share: Callable[[], Any]) -> list[Any]:
        """Return the result of `share` in every lane, in the order of lanes."""
        now = {path: seen_by(metric) for path, metric in self._metrics.items()}
        own = self._lanes.each(self.lane, share)
        self._load_seen(now)
        return self._lanes.by_lane(self._gather(own))

    def state_dict(self) -> dict[str, Any]:
        """Return every metric's state, lane by lane."""
        return self._lanes.state_dict(self.lane, super().state_dict)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the states of every lane."""
        self._lanes.load_state_dict(self.lane, super().load_state_dict, state_dict)

    def resharded(self, states: Sequence[dict[str, Any]], rank: int) -> dict[str, Any]:
        """Return the states of the lanes of this rank, from the ranks that ran them before."""
        return self._lanes.resharded(states)
