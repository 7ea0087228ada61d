"""torchmetrics in a run in lanes: what a lane has seen is kept apart, and put together in the order of lanes."""

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
    """Metrics that stand for as many ranks as this one has lanes: a lane begins with what it has seen so far.

    Args:
        module: where the metrics are.
        gather: returns every rank's copy of a value.
        lanes: of the run, and those of this rank.

    Raises:
        NotExact: one of them puts the ranks' states together itself.
    """

    def __init__(self, module: nn.Module, gather: Callable[[object], list[Any]], lanes: Lanes) -> None:
        self._lanes = lanes
        self._lane: int | None = None
        #: what each metric has seen, by lane and path
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
                    f"lanes with the metric {path}, a {type(metric).__name__} that came up after the module was set "
                    "up: what each lane has seen of it cannot be told apart. Make it in __init__ or setup."
                )
            if self._lanes.count > 1 and exchanges_itself(metric):
                raise NotExact(
                    f"lanes with the metric {path}, a {type(metric).__name__}: it exchanges its state with other ranks "
                    "itself, and would leave out the lanes of this one. Log its value, or leave lanes out."
                )
            self._follow_resets(path, metric)

    def _follow_resets(self, path: str, metric: Any) -> None:
        """Let a reset outside a lane be one of all lanes."""
        reset = metric.reset

        def reset_lanes(_: Any) -> None:
            reset()
            if self._lane is None:
                for seen in self._seen.values():
                    seen[path] = copy.deepcopy(self._unseen[path])

        metric.reset = MethodType(reset_lanes, metric)

    @contextmanager
    def lane(self, lane: int) -> Iterator[None]:
        """Let the metrics within be those of `lane`."""
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
        """Have every metric hold what it has seen according to `seen`, by path."""
        for path, metric in self._metrics.items():
            vars(metric).update(seen[path])
        for collection in self._collections.values():
            link_groups(collection)

    def _gather_shares(self, share: Callable[[], Any]) -> list[Any]:
        """Return what `share` gives in every lane, in their order."""
        now = {path: seen_by(metric) for path, metric in self._metrics.items()}
        own = self._lanes.each(self.lane, share)
        self._load_seen(now)
        return self._lanes.by_lane(self._gather(own))

    def state_dict(self) -> dict[str, Any]:
        """Return every metric's state, lane by lane."""
        return self._lanes.state_dict(self.lane, super().state_dict)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take every lane's states back."""
        self._lanes.load_state_dict(self.lane, super().load_state_dict, state_dict)

    def resharded(self, states: Sequence[dict[str, Any]], rank: int) -> dict[str, Any]:
        """Return what the metrics of this rank's lanes have seen, wherever those were run."""
        return self._lanes.resharded(states)
