"""torchmetrics inside a module: every rank's own state, and how the ranks put theirs together.

torchmetrics is imported only where the user has imported it: it costs seconds.
"""

import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torchmetrics import Metric

__all__ = ["Metrics", "is_metric"]


def is_metric(value: object) -> bool:
    """Return whether `value` is a torchmetrics metric or a collection of them."""
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(value, (library.Metric, library.MetricCollection))


class Metrics:
    """The metrics of a module as one part of a run's state.

    Every rank saves its own state: nothing is synced for saving, and a single process never syncs.

    Args:
        module: where the metrics are.
        gather: returns every rank's copy of a value.
        size: ranks.
    """

    def __init__(self, module: nn.Module, gather: Callable[[object], list[Any]], size: int) -> None:
        library = sys.modules.get("torchmetrics")
        self._modules = dict(module.named_modules())
        self._paths = {id(m): name for name, m in self._modules.items() if is_metric(m)}
        self._metrics: dict[str, Metric] = {
            name: m for name, m in self._modules.items() if library is not None and isinstance(m, library.Metric)
        }

        def gathered(tensor: Tensor, group: Any = None) -> list[Tensor]:
            return _like_each_other(gather(tensor.detach().cpu()), tensor.device)

        for metric in self._metrics.values():
            metric.dist_sync_fn = gathered
            metric.distributed_available_fn = lambda: size > 1

    def path(self, metric: object) -> str | None:
        """Return where `metric` is in the module; None if it is not there."""
        return self._paths.get(id(metric))

    def compute(self, path: str) -> Any:
        """Return the value of the metric at `path` over all ranks, and reset it."""
        metric: Any = self._modules[path]
        with warnings.catch_warnings():
            # A rank that had no batch of its own still takes part.
            warnings.filterwarnings("ignore", message=".*was called before the ``update``.*")
            value = metric.compute()
        metric.reset()
        return value

    def state_dict(self) -> dict[str, Any]:
        """Return every metric's own state on this rank, and how often it was updated."""
        return {
            path: {
                "states": {name: getattr(metric, name) for name in metric._defaults},
                "updates": metric._update_count,
            }
            for path, metric in self._metrics.items()
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take every metric's state back."""
        for path, saved in state_dict.items():
            metric = self._metrics[path]
            for name, value in saved["states"].items():
                setattr(metric, name, _on(value, metric.device))
            metric._update_count = saved["updates"]
            metric._computed = None


def _on(value: Any, device: Any) -> Any:
    return [item.to(device) for item in value] if isinstance(value, list) else value.to(device)


def _like_each_other(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Give the empty pieces of ranks without updates the type of the others: they would widen it."""
    kind = next((t.dtype for t in tensors if t.numel()), tensors[0].dtype)
    return [(t.to(kind) if not t.numel() else t).to(device) for t in tensors]
