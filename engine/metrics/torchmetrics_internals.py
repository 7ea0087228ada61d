"""Private names of torchmetrics, used here only.

`tests/unit/test_internals.py` tests each of them.
"""

import copy
import sys
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from torch import nn

__all__ = [
    "SETUP",
    "batch_value",
    "begin_anew",
    "defaults",
    "exchanges_itself",
    "is_kind_of_metric",
    "keeps_states",
    "link_groups",
    "load_groups",
    "reductions",
    "saved_groups",
    "seen_by",
    "set_anew",
    "set_anew_among",
    "set_updates",
    "sync_by",
    "updates",
    "without_seen",
]

#: attributes of a metric besides its accumulated state: set-up, caches, and parts kept elsewhere
SETUP = frozenset(
    {
        *("dist_sync_fn", "distributed_available_fn"),  # of this world
        *("training", "compute_on_cpu", "dist_sync_on_step", "process_group", "sync_on_compute", "compute_with_cache"),
        *("_device", "_dtype", "_update_count", "_to_sync", "_should_unsync", "_enable_grad", "_dtype_convert"),
        *("_is_synced", "_computed", "_forward_cache", "_TORCH_GREATER_EQUAL_2_1", "_cache"),
        *("_defaults", "_persistent", "_reductions", "_update_signature", *vars(nn.Module())),
    }
)

#: of these, those that each object of a metric is given anew: methods around its own, caches, and ways to other ranks
_SET_ANEW = frozenset(
    {
        *("update", "compute", "_update_signature", "_computed"),
        *("dist_sync_fn", "distributed_available_fn", "_sync_dist"),
    }
)


def set_anew_among(attributes: Mapping[str, Any]) -> frozenset[str]:
    """Return the attributes that each object of a metric gets anew; none for other objects."""
    return _SET_ANEW if "_update_count" in attributes else frozenset()


def without_seen(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the set-up attributes of a metric; of another object, all attributes."""
    if "_update_count" not in attributes:
        return attributes
    return {name: value for name, value in attributes.items() if name in SETUP - {"_forward_cache"}}


def begin_anew(metric: Any) -> None:
    """Reset a metric that has only its set-up attributes. Ignore other objects."""
    for name, default in defaults(metric).items():
        setattr(metric, name, copy.deepcopy(default))


def is_kind_of_metric(kind: type) -> bool:
    """Return whether objects of `kind` are metrics, not collections of them."""
    library = sys.modules.get("torchmetrics.metric")
    return library is not None and issubclass(kind, library.Metric)


def set_anew(metric: Any) -> None:
    """Set the attributes that each object gets anew, on a metric created without its code."""
    is_distributed = sys.modules["torchmetrics.metric"].jit_distributed_available
    caches = {"_update_count": 0, "_computed": None, "_forward_cache": None}
    metric.__setstate__({**caches, "dist_sync_fn": None, "distributed_available_fn": is_distributed})


def defaults(metric: Any) -> dict[str, Any]:
    """Return the metric's states by name, as they are before an update; empty for a collection."""
    return getattr(metric, "_defaults", {})


def keeps_states(metric: Any) -> bool:
    """Return whether it is a metric with its own states, not a collection."""
    return hasattr(metric, "_update_count")


def batch_value(metric: Any) -> Any:
    """Return the metric's value of its last call; None if it was not called since a reset."""
    return getattr(metric, "_forward_cache", None)


def reductions(metric: Any) -> dict[str, Callable[..., Any] | None]:
    """Return by which function each state of the metric is put together over ranks."""
    found: dict[str, Callable[..., Any] | None] = metric._reductions
    return found


def updates(metric: Any) -> int:
    """Return how often the metric was updated."""
    count: int = metric._update_count
    return count


def seen_by(metric: Any) -> dict[str, Any]:
    """Return the attributes with the metric's accumulated state, without copying."""
    names = {name for name, value in vars(metric).items() if name not in SETUP and not callable(value)}
    return {name: vars(metric)[name] for name in names | {*metric._defaults, "_update_count"}}


def set_updates(metric: Any, count: int) -> None:
    """Have the metric count as updated so often, and not as computed."""
    metric._update_count = count
    metric._computed = None


def saved_groups(collection: Any) -> dict[str, Any]:
    """Return which metrics of a collection share their states."""
    return {
        "groups": dict(collection._groups),
        "checked": collection._groups_checked,
        "copied": collection._state_is_copy,
    }


def load_groups(collection: Any, saved: dict[str, Any]) -> None:
    """Let metrics of a collection share their states as `saved_groups` said."""
    collection._groups, collection._groups_checked = dict(saved["groups"]), saved["checked"]
    collection._state_is_copy = saved["copied"]
    link_groups(collection, copied=saved["copied"])


def link_groups(collection: Any, *, copied: bool = False) -> None:
    """Let metrics of a collection share their states, where it has found which do."""
    if collection._groups_checked:
        collection._compute_groups_create_state_ref(copy=copied)


def exchanges_itself(metric: Any) -> bool:
    """Return True if the metric's class merges the states of ranks itself."""
    return type(metric)._sync_dist is not sys.modules["torchmetrics"].Metric._sync_dist


def sync_by(metric: Any, sync_dist: Callable[..., None]) -> None:
    """Let the metric exchange by `sync_dist(metric, ...)`, unless it has its own way."""
    if not exchanges_itself(metric):
        metric._sync_dist = MethodType(sync_dist, metric)
