"""What a data set, and what reads it, hold: taken as nodes, and put back in place."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from midstride.engine.objects.attribute_restore import set_class
from midstride.engine.objects.attributes import attributes_of, delete_attribute, items_of, set_attribute
from midstride.engine.objects.containers import MISSING
from midstride.engine.objects.data_sets import TORCH_DATA, is_of_attributes
from midstride.engine.objects.graph import GraphWalk
from midstride.engine.objects.graph_restore import GraphRestore
from midstride.engine.objects.node_writers import is_described
from midstride.engine.objects.plain_values import kind_name

__all__ = ["DataOwners", "Nodes", "WholeData", "data_owners"]

#: attributes by the path of their owner and by name, as nodes; the name of the owner's class stands among them
Nodes = dict[str, dict[str, Any]]
_CLASS = "__class__"


class WholeData:
    """Data that are not, or not only, what attributes say: a list, a tensor, a library's data set."""

    def __init__(self, dataset: object) -> None:
        self.dataset = dataset


def data_owners(name: str, dataset: object) -> Iterator[tuple[str, Any]]:
    """Yield by name what has the attributes that `dataset` consists of: itself, and those that torch's own read for it.

    Of a library's objects that are no data sets of torch's, nothing is known.
    """
    if is_of_attributes(type(dataset)):
        yield from _owners(name, dataset)
    elif is_described(type(dataset)) or isinstance(dataset, Dataset):
        yield name, WholeData(dataset)


def _owners(name: str, dataset: object) -> Iterator[tuple[str, Any]]:
    if not is_of_attributes(type(dataset)):
        return  # its owner has it among its attributes
    if not isinstance(dataset, TORCH_DATA):
        yield name, dataset
        return
    # Another data set may come to stand in the place of one in it: no path of that is to begin as one of this does.
    yield f"{name.replace('/', '.')} (torch)", dataset
    if isinstance(dataset, Subset):
        yield from _owners(f"{name}/dataset", dataset.dataset)
    for key, one in items_of(getattr(dataset, "datasets", ())) or ():
        yield from _owners(f"{name}/datasets/{key}", one)


class DataOwners:
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
        """Return what they hold, which is not copied, and of what class they are."""
        return self._nodes(self._walk())

    def fill(self, nodes: Nodes) -> dict[str, str]:
        """Let them hold what `nodes` say, in place; return what could not be brought back, by path, and why."""
        walk, owners = self._walk(), self.owners()
        self._nodes(walk)
        filling = GraphRestore(walk, self._anchors(), torch.device("cpu"))
        for path, (owner, own) in owners.items():
            if path not in nodes:
                continue
            wanted = copy.deepcopy(nodes[path])
            kind = wanted.pop(_CLASS, None)
            if kind is not None and not set_class(owner, kind):
                filling.give_up(path, kind, owner)
            for name, node in wanted.items():
                before = own.get(name, MISSING)
                value = filling.put(node, self.filled(path, name, node, before), f"{path}/{name}")
                if isinstance(owner, WholeData) and value is not before:
                    filling.give_up(f"{path}/{name}", "another object", before)
                elif value is not MISSING:
                    set_attribute(owner, name, value)
            for name in own.keys() - wanted.keys():
                delete_attribute(owner, name)
        return filling.stale

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
        return {
            path: {**walk.root_attributes(own, path, is_small=True), _CLASS: kind_name(type(owner))}
            for path, (owner, own) in self.owners().items()
        }

    def _anchors(self) -> dict[str, object]:
        named: dict[str, object] = {path: owner for path, (owner, _) in self.owners().items()}
        return named if self._module is None else named | {"module": self._module}

    def _walk(self) -> GraphWalk:
        return GraphWalk({id(value): name for name, value in self._anchors().items()}, {})
