"""Base class of kinds: a family of objects becomes a node, and is restored from it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from midstride.engine.state.object_nodes import Instance, kind_name

if TYPE_CHECKING:
    from midstride.engine.objects.restore import GraphRestore
    from midstride.engine.objects.walk import GraphWalk

__all__ = ["MISSING", "Kind", "is_alike"]

#: placeholder for a value that a live object does not have
MISSING: Any = type("Missing", (), {"__repr__": lambda self: "missing"})()


class Kind:
    """One family of objects. A new kind is one subclass, and one row in `table.KINDS`."""

    #: name on disk of its nodes of class `Instance`; "" if it has none
    form: ClassVar[str] = ""
    #: other classes of its nodes
    node_types: ClassVar[tuple[type, ...]] = ()
    #: classes whose objects are of this kind; derived classes are not
    types: ClassVar[tuple[Any, ...]] = ()
    #: whether a node holds more than the name of a class
    is_described: ClassVar[bool] = True
    #: whether a restore fills live objects, which other code may hold too; else it makes others
    is_filled: ClassVar[bool] = True

    def matches(self, kind: type) -> bool:
        """Return whether objects of the class `kind` are of this kind; asked once for each class."""
        return kind in self.types

    def fills(self, value: Any) -> bool:
        """Return whether a restore fills `value`; else it makes another object."""
        return self.is_filled

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the node of `value` at `path`."""
        raise NotImplementedError(f"{type(self).__name__} matches objects, and needs a method describe")

    def restore(self, restore: "GraphRestore", node: Any, live: Any, path: str) -> Any:
        """Return the value for `path`: `live`, filled from `node` if possible.

        MISSING if the value cannot be restored and there is no live one.
        """
        raise NotImplementedError(f"{type(self).__name__} makes nodes of its own, and needs a method restore")

    def parts(self, node: Any, live: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the nodes in `node`, each with its live value.

        Those that `lost_part` looks at; MISSING stands for no value.
        """
        yield from ()

    def lost_part(self, restore: "GraphRestore", node: Any, live: Any, *, is_late: bool) -> Any:
        """Return a node that cannot be made and that `live` lacks, such as a socket's.

        It is `node` or a node in it; None if there is none.

        Args:
            restore: the restore, which looks at the nodes in this one.
            node: a node of this kind.
            live: the live value at its place, or MISSING.
            is_late: whether an object around it is made anew.
        """
        found = (restore.lost_part(part, own, is_late=is_late) for part, own in self.parts(node, live))
        return next((part for part in found if part is not None), None)

    def instance(self, value: object, /, **state: Any) -> Instance:
        """Return a node of this form for `value`."""
        return Instance(self.form, kind_name(type(value)), state)


def is_alike(node: Instance, live: Any) -> bool:
    """Return whether `live` is an object of the class of `node`."""
    return live is not MISSING and kind_name(type(live)) == node.kind
