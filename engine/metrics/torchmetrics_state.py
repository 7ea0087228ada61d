"""torchmetrics inside a module: the state of each rank, and its reduction over the ranks.

torchmetrics is used only if the user has imported it: its import takes seconds.
"""

import copy
import logging
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from midstride.engine.errors import NotExact
from midstride.engine.metrics.torchmetrics_internals import (
    SETUP,
    defaults,
    load_groups,
    reductions,
    saved_groups,
    set_updates,
    sync_by,
    updates,
)
from midstride.engine.state.codec import is_writable
from midstride.engine.state.differences import differences
from midstride.engine.trees import convert

if TYPE_CHECKING:
    from torchmetrics import Metric

__all__ = ["TorchmetricsState", "is_metric", "objects_in"]

log = logging.getLogger(__name__)

#: reductions by which states can be merged in the middle of an epoch
_MERGED = frozenset({"dim_zero_sum", "dim_zero_max", "dim_zero_min", "dim_zero_cat"})
#: methods that torchmetrics sets on each instance
_WRAPPED = frozenset({"update", "compute"})


def is_metric(value: object) -> bool:
    """Return whether `value` is a torchmetrics metric or a collection of them."""
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(value, (library.Metric, library.MetricCollection))


def objects_in(metric: nn.Module) -> dict[str, Any]:
    """Return attributes of a metric that hold objects, which `TorchmetricsState` does not keep."""
    no_objects = {*SETUP, *_WRAPPED, *defaults(metric)}
    return {name: value for name, value in vars(metric).items() if name not in no_objects and not _is_plain(value)}


class TorchmetricsState:
    """The metrics of a module as one part of a run's state.

    Every rank saves its own state: nothing is synced for saving, and a single process never syncs.

    Args:
        module: the module with the metrics.
        gather: returns every rank's copy of a value.
        size: number of ranks.
    """

    def __init__(self, module: nn.Module, gather: Callable[[object], list[Any]], size: int) -> None:
        self._module, self._gather, self._size = module, gather, size
        #: metrics and collections, by path in the module; references, so that no other object gets the id of one
        self._found: dict[str, Any] = {}
        self._paths: dict[int, str] = {}
        self._metrics: dict[str, Metric] = {}
        self._collections: dict[str, Any] = {}
        self._reported: set[str] = set()
        self._in_two_stages: set[str] = set()
        self._look_up()

    def _look_up(self) -> None:
        """Find the metrics of the module, which user code can replace at any time."""
        library = sys.modules.get("torchmetrics")
        if library is None:
            return
        found: dict[str, Any] = {}
        for path, submodule in self._module.named_modules():
            if is_metric(submodule):
                found[path] = submodule
        new = {path: metric for path, metric in found.items() if self._found.get(path) is not metric}
        if not new and len(found) == len(self._found):
            return
        self._found, self._paths = found, {id(metric): path for path, metric in found.items()}
        self._metrics = {path: metric for path, metric in found.items() if isinstance(metric, library.Metric)}
        self._collections = {path: metric for path, metric in found.items() if path not in self._metrics}
        self._adopt({path: metric for path, metric in self._metrics.items() if path in new})

    def _adopt(self, metrics: Mapping[str, "Metric"]) -> None:
        """Let new `metrics` exchange their states through the engine."""
        for metric in metrics.values():
            _sync_through(metric, self._gather_shares, self._size)

    def _gather_shares(self, share: Callable[[], Any]) -> list[Any]:
        """Return the result of `share` on every rank, in the order of ranks."""
        return self._gather(share())

    def path(self, metric: object) -> str | None:
        """Return the path of `metric` in the module; None if it is not there."""
        if id(metric) not in self._paths:
            self._look_up()
        return self._paths.get(id(metric))

    def compute(self, paths: Sequence[str], *, reset: bool = True) -> list[Any]:
        """Return the values of the metrics at `paths` over all ranks; by default, reset them."""
        metrics: list[Any] = [self._found[path] for path in paths]
        with warnings.catch_warnings():
            # A rank without a batch takes part, too.
            warnings.filterwarnings("ignore", message=".*was called before the ``update``.*")
            values = [metric.compute() for metric in metrics]
        for metric in metrics if reset else ():  # only now: a metric can have two logged names
            metric.reset()
        return values

    def warn_of_graphs(self) -> None:
        """Warn of metrics that keep predictions with their autograd graph in memory until a reset."""
        if hanging := [
            path for path, metric in self._metrics.items() if path not in self._reported and _holds_graph(metric)
        ]:
            self._reported.update(hanging)
            log.warning(
                "the metric %s received predictions with an autograd graph: the graph of every batch stays in memory "
                "until a reset. Pass predictions.detach()",
                ", ".join(hanging),
            )

    def warn_of_two_stages(self, path: str) -> None:
        """Warn, once, of a metric that is logged in training and in an evaluation."""
        if path not in self._in_two_stages:
            self._in_two_stages.add(path)
            log.warning(
                "the metric %s is logged in training and in an evaluation: their updates are mixed, and the end of the "
                "evaluation resets it. Use one metric for each",
                path,
            )

    def without_states(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Return `weights` without the states of metrics, which are included if they are persistent."""
        self._look_up()
        states = {f"{path}.{name}" if path else name for path, m in self._metrics.items() for name in defaults(m)}
        return {name: value for name, value in weights.items() if name not in states}

    def state_dict(self) -> dict[str, Any]:
        """Return every metric's own state on this rank, and how often it was updated."""
        self._look_up()
        return {
            "metrics": {path: _state_of(metric) for path, metric in self._metrics.items()},
            # Metrics of a collection with equal states share them; the first update finds which.
            "groups": {path: saved_groups(collection) for path, collection in self._collections.items()},
        }

    def rollback_point(self) -> Callable[[], None]:
        """Return a function that reverts all updates of the metrics from now on."""
        state = _copied(self.state_dict())
        return lambda: self.load_state_dict(state)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the state of every metric."""
        self._look_up()
        for path, saved in state_dict["metrics"].items():
            metric = self._metrics[path]
            for name, value in {**saved["states"], **saved["attributes"]}.items():
                setattr(metric, name, _on(value, metric.device))
            set_updates(metric, saved["updates"])
        for path, saved in state_dict["groups"].items():
            load_groups(self._collections[path], saved)

    def resharded(self, states: Sequence[dict[str, Any]], rank: int) -> dict[str, Any]:
        """Return for rank 0 the merged states of all ranks, and for the others empty states.

        Raises:
            NotExact: a state cannot be merged before the metric is computed.
        """
        metrics = {}
        for path, metric in self._metrics.items():
            ranks = [state["metrics"][path] for state in states]
            metrics[path] = _merge_ranks(path, metric, ranks)  # refused on every rank or on none
            if rank and metrics[path]["updates"]:
                empty = {name: copy.deepcopy(default) for name, default in defaults(metric).items()}
                metrics[path] = {"states": empty, "attributes": ranks[0]["attributes"], "updates": 0}
        return {"metrics": metrics, "groups": states[0]["groups"]}


def _merge_ranks(path: str, metric: "Metric", ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the merged state of several ranks."""
    seen = [one for one in ranks if one["updates"]] or ranks[:1]
    if len(seen) == 1:
        return seen[0]
    kinds = {name: getattr(reduction, "__name__", "none") for name, reduction in reductions(metric).items()}
    lost = [name for name, kind in kinds.items() if kind not in _MERGED]
    if any(differences(seen[0]["attributes"], one["attributes"]) for one in seen):
        lost.append("plain attributes")
    if lost:
        raise NotExact(
            f"the metric {path}, a {type(metric).__name__}, cannot change the number of processes in the middle of an "
            f"epoch: {', '.join(lost)} cannot be merged before it is computed. Resume with the number of processes "
            "that took the snapshot."
        )
    states = {
        name: _joined([one["states"][name] for one in seen], reductions(metric)[name]) for name in defaults(metric)
    }
    return {
        "states": {name: _to_saved(metric, name, value) for name, value in states.items()},
        "attributes": seen[0]["attributes"],
        "updates": sum(one["updates"] for one in seen),
    }


def _to_saved(metric: "Metric", name: str, value: Any) -> Any:
    """Return `value` as the metric holds it between updates: lists stay lists."""
    return [value] if isinstance(defaults(metric)[name], list) and isinstance(value, Tensor) else value


def _holds_graph(metric: "Metric") -> bool:
    values = [getattr(metric, name) for name in defaults(metric)]
    tensors = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)


def _state_of(metric: "Metric") -> dict[str, Any]:
    states = {name: getattr(metric, name) for name in defaults(metric)}
    return {
        # After the backward pass of a batch only values are needed, not its graph.
        "states": convert(states, Tensor.detach) if _holds_graph(metric) else states,
        # Wrappers and users' own metrics keep state in plain attributes, too.
        "attributes": {
            name: value
            for name, value in vars(metric).items()
            if name not in SETUP and name not in defaults(metric) and _is_plain(value)
        },
        "updates": updates(metric),
    }


def _copied(value: Any) -> Any:
    """Return a copy of `value`. Metrics change tensors and lists in place, but not list items."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    return list(value) if isinstance(value, list) else value


def _is_plain(value: object) -> bool:
    return not callable(value) and is_writable(value)


def _sync_through(metric: "Metric", everyones: Callable[[Callable[[], Any]], list[Any]], size: int) -> None:
    """Let `metric` exchange all its states by `everyones` at once, even if they differ by rank."""
    if size == 1:
        metric.distributed_available_fn = _never
        return

    def sync_dist(self: Any, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        def mine() -> Any:
            return updates(self), _on({name: getattr(self, name) for name in reductions(self)}, "cpu")

        ranks = everyones(mine)
        # Defaults of a rank without updates are no values: they would count in a mean.
        having = [states for count, states in ranks if count] or [states for _, states in ranks]
        for name, reduction in reductions(self).items():
            setattr(self, name, _joined([_on(states[name], self.device) for states in having], reduction))

    def gathered(tensor: Tensor, group: Any = None) -> list[Tensor]:
        return [_on(piece, tensor.device) for piece in everyones(lambda: tensor.detach().cpu())]

    metric.distributed_available_fn = lambda: True
    metric.dist_sync_fn = gathered  # for metrics that arrange the exchange themselves
    sync_by(metric, sync_dist)


def _never() -> bool:
    return False


def _joined(pieces: list[Any], reduction: Callable[..., Any] | None) -> Any:
    """Return one state of all ranks as torchmetrics does: stacked or joined, then reduced."""
    together: Any = torch.stack(pieces) if isinstance(pieces[0], Tensor) else [i for piece in pieces for i in piece]
    if reduction is None or (isinstance(together, list) and not together):
        return together
    return reduction(together)


def _on(value: Any, device: Any) -> Any:
    return convert(value, lambda tensor: tensor.detach().to(device))
