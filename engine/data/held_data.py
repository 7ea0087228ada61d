"""What a data set, and what reads it, hold: taken as nodes, and put back in place."""

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import ChainDataset, ConcatDataset, Dataset, StackDataset, Subset

from midstride.engine.code_origin import is_user_class
from midstride.engine.objects.attributes import attributes_of, delete_attribute, items_of, set_attribute
from midstride.engine.objects.containers import MISSING
from midstride.engine.objects.graph import GraphWalk
from midstride.engine.objects.graph_restore import GraphRestore

__all__ = ["HeldData", "Nodes", "is_value", "users_data"]

#: attributes by the path of their owner and by name, as nodes
Nodes = dict[str, dict[str, Any]]
#: torch's own around other data sets
_WRAPPERS = (Subset, ConcatDataset, ChainDataset, StackDataset)
_CONTAINERS = (list, tuple, dict, deque)


def users_data(name: str, dataset: object) -> Iterator[tuple[str, Any]]:
    """Yield `dataset` and those that it reads, where they are the user's or torch's own around others."""
    if is_value(dataset):
        return
    if is_user_class(type(dataset)) or isinstance(dataset, _WRAPPERS):
        yield name, dataset
    if isinstance(dataset, Subset):
        yield from users_data(f"{name}/dataset", dataset.dataset)
    elif isinstance(dataset, (ConcatDataset, ChainDataset, StackDataset)):
        for key, inner in items_of(dataset.datasets) or ():
            yield from users_data(f"{name}/datasets/{key}", inner)


def is_value(dataset: object) -> bool:
    """Return whether `dataset` is a value, such as a list or a tensor, of which what reads it is the owner."""
    return isinstance(dataset, _CONTAINERS) or not (isinstance(dataset, Dataset) or is_user_class(type(dataset)))


class HeldData:
    """Owners of attributes, by path, and what those hold.

    Args:
        owners: by path.
        module: which they may hold, and other parts of the state keep.
    """

    def __init__(self, owners: Mapping[str, Any], module: nn.Module | None = None) -> None:
        self._given, self._module = owners, module

    def owners(self) -> dict[str, tuple[Any, dict[str, Any]]]:
        """Return the owners by path, each with a copy of its attributes."""
        return {path: (owner, attributes_of(owner)) for path, owner in self._given.items()}

    def filled(self, path: str, name: str, node: Any, live: Any) -> Any:
        """Return what is to be filled as `node` says, where `live` stands; MISSING for a new one."""
        return live

    def nodes(self) -> Nodes:
        """Return what they hold, which is not copied."""
        return self._nodes(self._walk())

    def fill(self, nodes: Nodes) -> None:
        """Let them hold what `nodes` say, in place."""
        walk, owners = self._walk(), self.owners()
        self._nodes(walk)
        filling = GraphRestore(walk, self._anchors(), torch.device("cpu"))
        for path, (owner, own) in owners.items():
            if path not in nodes:
                continue
            wanted = copy.deepcopy(nodes[path])
            for name, node in wanted.items():
                live = self.filled(path, name, node, own.get(name, MISSING))
                value = filling.put(node, live, f"{path}/{name}")
                if value is not MISSING:
                    set_attribute(owner, name, value)
            for name in own.keys() - wanted.keys():
                delete_attribute(owner, name)

    @contextmanager
    def reverted(self) -> Iterator[None]:
        """Put back, after the block, what they hold now: each object that stands directly in an owner is the same."""
        now, owners = copy.deepcopy(self.nodes()), self.owners()
        try:
            yield
        finally:
            for path, (owner, own) in self.owners().items():
                for name in own.keys() - owners[path][1].keys():
                    delete_attribute(owner, name)
                for name, value in owners[path][1].items():
                    set_attribute(owner, name, value)
            self.fill(now)

    def _nodes(self, walk: GraphWalk) -> Nodes:
        return {path: walk.root_attributes(own, path, is_small=True) for path, (_, own) in self.owners().items()}

    def _anchors(self) -> dict[str, object]:
        named: dict[str, object] = {path: owner for path, (owner, _) in self.owners().items()}
        return named if self._module is None else named | {"module": self._module}

    def _walk(self) -> GraphWalk:
        return GraphWalk({id(value): name for name, value in self._anchors().items()}, {})
