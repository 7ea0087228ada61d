"""Base class of kinds: a family of objects becomes a node, and is restored from it."""

from typing import TYPE_CHECKING, Any, ClassVar

from midstride.engine.state.object_nodes import Instance, kind_name

if TYPE_CHECKING:
    from midstride.engine.objects.restore import GraphRestore
    from midstride.engine.objects.walk import GraphWalk

__all__ = ["MISSING", "Kind"]

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

    def matches(self, kind: type) -> bool:
        """Return whether objects of the class `kind` are of this kind; asked once for each class."""
        return kind in self.types

    def describe(self, walk: "GraphWalk", value: Any, path: str) -> Any:
        """Return the node of `value` at `path`."""
        raise NotImplementedError(f"{type(self).__name__} matches objects, and needs a method describe")

    def restore(self, restore: "GraphRestore", node: Any, live: Any, path: str) -> Any:
        """Return the value for `path`: `live`, filled from `node` if possible.

        MISSING if the value cannot be restored and there is no live one.
        """
        raise NotImplementedError(f"{type(self).__name__} makes nodes of its own, and needs a method restore")

    def instance(self, value: object, /, **state: Any) -> Instance:
        """Return a node of this form for `value`."""
        return Instance(self.form, kind_name(type(value)), state)
