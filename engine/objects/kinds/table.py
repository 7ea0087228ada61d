"""The table of kinds: one row for each, in the order in which they are asked for a class."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from midstride.engine.objects.kinds.arrays import (
    Arrays,
    DataTypes,
    DerivedArrays,
    MaskedArrays,
    MemoryMaps,
    Numbers,
    Records,
    Scalars,
)
from midstride.engine.objects.kinds.blocks import Blocks
from midstride.engine.objects.kinds.containers import (
    ByteArrays,
    Deques,
    Dicts,
    Lists,
    NamedTuples,
    Proxies,
    Sets,
    Tuples,
)
from midstride.engine.objects.kinds.functions import Functions, Methods, Partials, WeakContainers, WeakReferences
from midstride.engine.objects.kinds.generators import Generators
from midstride.engine.objects.kinds.iterators import Counts, Cursors, Iterators
from midstride.engine.objects.kinds.kind import Kind
from midstride.engine.objects.kinds.library_objects import (
    AttributeObjects,
    Graphs,
    LibraryObjects,
    Pipelines,
    Statefuls,
)
from midstride.engine.objects.kinds.opaque import LEFT_OUT, OPAQUE
from midstride.engine.objects.kinds.plain import ADDRESSES, CLASSES, Enums, Values
from midstride.engine.objects.kinds.reduced import Reduced
from midstride.engine.objects.kinds.tables import Tables
from midstride.engine.objects.kinds.tensors import FlippedTensors, ShardedTensors, Tensors, Views
from midstride.engine.objects.kinds.user_objects import DataSets, DerivedValues, UserObjects
from midstride.engine.state.object_nodes import Instance

if TYPE_CHECKING:
    from midstride.engine.objects.walk import GraphWalk

__all__ = ["KINDS", "describer_of", "kind_of", "kind_of_node", "kinds_of_nodes"]

KINDS: Sequence[Kind] = (
    # of classes that are known
    *(Tensors(), Arrays(), Lists(), Tuples(), Dicts(), Sets(), Deques(), ByteArrays(), Values()),
    *(Functions(), Methods(), WeakReferences(), WeakContainers(), Counts(), Cursors(), Iterators(), DataSets()),
    *(ShardedTensors(), Graphs(), MaskedArrays(), DerivedArrays(), MemoryMaps(), DataTypes(), Tables(), Proxies()),
    # of their derived classes, and of the user's
    *(
        Generators(),
        Records(),
        Scalars(),
        Enums(),
        Numbers(),
        NamedTuples(),
        Partials(),
        Reduced(),
        OPAQUE,
        DerivedValues(),
        UserObjects(),
    ),
    # of libraries
    *(Pipelines(), Statefuls(), AttributeObjects(), LibraryObjects()),
    # of no class: kinds of numbers, of names, of nodes, of views, of long containers
    *(ADDRESSES, CLASSES, LEFT_OUT, Views(), FlippedTensors(), Blocks()),
)
#: class -> `describe` of the kind of its objects; classes that are met are added
_DESCRIBERS: "dict[type, Callable[[GraphWalk, Any, str], Any]]" = {}


def kind_of(kind: type) -> Kind:
    """Return the kind of objects of a class."""
    return next(one for one in KINDS if one.matches(kind))


def describer_of(kind: type) -> "Callable[[GraphWalk, Any, str], Any]":
    """Return the method that describes objects of a class."""
    return _DESCRIBERS.get(kind) or _DESCRIBERS.setdefault(kind, kind_of(kind).describe)


def kinds_of_nodes(kinds: Sequence[Kind]) -> dict[str | type, Kind]:
    """Return the kinds by form of an instance or class of a node."""
    found: dict[str | type, Kind] = {}
    for kind in reversed(kinds):  # of two with one form, the first row counts
        found |= dict.fromkeys([*([kind.form] if kind.form else []), *kind.node_types], kind)
    return found


_OF_NODES = kinds_of_nodes(KINDS)


def kind_of_node(node: Any) -> Kind | None:
    """Return the kind that restores a node; None if the node is the value itself.

    Raises:
        KeyError: it is an instance of a form that this version does not know.
    """
    if type(node) is Instance:
        return _OF_NODES[node.form]
    return _OF_NODES.get(type(node))
