"""The table of kinds: one row for each, in the order in which they are asked for a class."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from midstride.engine.objects.kinds.arrays import Arrays, Numbers, Scalars
from midstride.engine.objects.kinds.blocks import Blocks
from midstride.engine.objects.kinds.containers import ByteArrays, Deques, Dicts, Lists, NamedTuples, Sets, Tuples
from midstride.engine.objects.kinds.functions import Functions, Methods, Partials, WeakReferences
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
from midstride.engine.objects.kinds.tensors import ShardedTensors, Tensors, Views
from midstride.engine.objects.kinds.user_objects import DataSets, DerivedValues, UserObjects
from midstride.engine.state.object_nodes import Instance

if TYPE_CHECKING:
    from midstride.engine.objects.restore import GraphRestore
    from midstride.engine.objects.walk import GraphWalk

__all__ = ["KINDS", "describer_of", "kind_of", "restorer_of", "restorers"]

KINDS: Sequence[Kind] = (
    # of classes that are known
    *(Tensors(), Arrays(), Lists(), Tuples(), Dicts(), Sets(), Deques(), ByteArrays(), Values()),
    *(Functions(), Methods(), WeakReferences(), Counts(), Cursors(), Iterators(), DataSets()),
    *(ShardedTensors(), Graphs()),
    # of their derived classes, and of the user's
    *(Generators(), Scalars(), Enums(), Numbers(), NamedTuples(), Partials(), OPAQUE, DerivedValues(), UserObjects()),
    # of libraries
    *(Pipelines(), Statefuls(), AttributeObjects(), LibraryObjects()),
    # of no class: one kind of number, of name, of nodes, of long containers
    *(ADDRESSES, CLASSES, LEFT_OUT, Views(), Blocks()),
)
#: class -> `describe` of the kind of its objects; classes that are met are added
_DESCRIBERS: "dict[type, Callable[[GraphWalk, Any, str], Any]]" = {}


def kind_of(kind: type) -> Kind:
    """Return the kind of objects of a class."""
    return next(one for one in KINDS if one.matches(kind))


def describer_of(kind: type) -> "Callable[[GraphWalk, Any, str], Any]":
    """Return the method that describes objects of a class."""
    return _DESCRIBERS.get(kind) or _DESCRIBERS.setdefault(kind, kind_of(kind).describe)


def restorers(kinds: Sequence[Kind]) -> "dict[str | type, Callable[[GraphRestore, Any, Any, str], Any]]":
    """Return the methods that restore nodes, by form of an instance or class of a node."""
    found: dict[str | type, Callable[[GraphRestore, Any, Any, str], Any]] = {}
    for kind in reversed(kinds):  # of two with one form, the first row counts
        found |= dict.fromkeys([*([kind.form] if kind.form else []), *kind.node_types], kind.restore)
    return found


_RESTORERS = restorers(KINDS)


def restorer_of(node: Any) -> "Callable[[GraphRestore, Any, Any, str], Any] | None":
    """Return the method that restores a node; None if the node is the value itself.

    Raises:
        KeyError: it is an instance of a form that this version does not know.
    """
    if type(node) is Instance:
        return _RESTORERS[node.form]
    return _RESTORERS.get(type(node))
