"""Objects that hold data, such as data sets: described as nodes, and restored in place."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Subset

from midstride.engine.objects.attributes import attributes_of, delete_attribute, items_of, set_attribute
from midstride.engine.objects.classes import TORCH_DATA, is_of_attributes, set_class
from midstride.engine.objects.generator_search import shared_memory
from midstride.engine.objects.kinds.kind import MISSING
from midstride.engine.objects.kinds.table import kind_of
from midstride.engine.objects.restore import GraphRestore
from midstride.engine.objects.walk import GraphWalk
from midstride.engine.state.differences import differences
from midstride.engine.state.object_nodes import kind_name

__all__ = ["Attribute", "DataOwners", "Nodes", "WholeData", "data_owners", "differing_attributes"]

#: path of an owner -> name of an attribute -> its node; the name of the owner's class is at `_CLASS`
Nodes = dict[str, dict[str, Any]]
_CLASS = "__class__"
#: path of an owner, and the name of an attribute
Attribute = tuple[str, str]


class WholeData:
    """Data beyond attributes: a list, a tensor, a library's data set.

    Of a library's stream, numbers in memory that processes share are described, such as the epoch of open_clip's data.
    """

    def __init__(self, dataset: object) -> None:
        self.dataset = dataset
        if isinstance(dataset, IterableDataset) and (shared := shared_memory(dataset)):
            self.shared = shared


def data_owners(name: str, dataset: object) -> Iterator[tuple[str, Any]]:
    """Yield names and owners of attributes of `dataset`: itself, and wrapped data sets.

    Those are wrapped by torch's data sets.

    Nothing is yielded for objects of other libraries that are no torch data sets.
    """
    if is_of_attributes(type(dataset)):
        yield from _owners(name, dataset)
    elif kind_of(type(dataset)).is_described or isinstance(dataset, Dataset):
        yield name, WholeData(dataset)


def _owners(name: str, dataset: object) -> Iterator[tuple[str, Any]]:
    if not is_of_attributes(type(dataset)):
        return  # it is an attribute of its owner
    if not isinstance(dataset, TORCH_DATA):
        yield name, dataset
        return
    # A data set in it may be replaced; the suffix keeps paths of the new one from starting with paths of this one.
    yield f"{name.replace('/', '.')} (torch)", dataset
    if isinstance(dataset, Subset):
        yield from _owners(f"{name}/dataset", dataset.dataset)
    for key, one in items_of(getattr(dataset, "datasets", ())) or ():
        yield from _owners(f"{name}/datasets/{key}", one)


class DataOwners:
    """Describes and restores the attributes of objects.

    Args:
        owners: path -> object.
        module: module that they may refer to, whose state is saved elsewhere.
    """

    def __init__(self, owners: Mapping[str, Any], module: nn.Module | None = None) -> None:
        self._given, self._module = owners, module

    def owners(self) -> dict[str, tuple[Any, dict[str, Any]]]:
        """Return path -> (owner, shallow copy of its attributes)."""
        return {path: (owner, attributes_of(owner)) for path, owner in self._given.items()}

    def restore_target(self, path: str, name: str, node: Any, live: Any) -> Any:
        """Return the object to restore `node` into, by default `live`; MISSING to make a new one."""
        return live

    def nodes(self) -> Nodes:
        """Return nodes of all attributes and the owners' class names; values are not copied."""
        return self._nodes(self._walk())

    def restore(self, nodes: Nodes) -> dict[str, str]:
        """Restore `nodes` in place; return path -> text on old values that were not restored."""
        walk, owners = self._walk(), self.owners()
        self._nodes(walk)
        restore = GraphRestore(walk, self._anchors(), torch.device("cpu"))
        for path, (owner, own) in owners.items():
            if path not in nodes:
                continue
            wanted = copy.deepcopy(nodes[path])
            kind = wanted.pop(_CLASS, None)
            if kind is not None and not set_class(owner, kind):
                restore.mark_stale(path, kind, owner)
            for name, node in wanted.items():
                before = own.get(name, MISSING)
                value = restore.value(node, self.restore_target(path, name, node, before), f"{path}/{name}")
                if isinstance(owner, WholeData) and value is not before:
                    restore.mark_stale(f"{path}/{name}", "another object", before)
                elif value is not MISSING:
                    set_attribute(owner, name, value)
            for name in own.keys() - wanted.keys():
                delete_attribute(owner, name)
        return restore.stale

    @contextmanager
    def reverted(self) -> Iterator[None]:
        """Restore the present values after the block; owners keep their attributes' objects."""
        now, owners = copy.deepcopy(self.nodes()), self.owners()
        try:
            yield
        finally:
            for path, (owner, own) in self.owners().items():
                for name in own.keys() - owners[path][1].keys():
                    delete_attribute(owner, name)
                for name, value in owners[path][1].items():
                    set_attribute(owner, name, value)
            self.restore(now)

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


def differing_attributes(a: Nodes, b: Nodes) -> set[Attribute]:
    """Return the attributes whose nodes differ, of owners that are in both."""
    names = {(path, name) for path in a.keys() & b.keys() for name in a[path].keys() | b[path].keys()}
    return {(path, name) for path, name in names if differences(a[path].get(name, MISSING), b[path].get(name, MISSING))}
