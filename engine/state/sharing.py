"""Containers that occur several times in a tree of state: written once, and referred to by their path elsewhere.

A `state_dict` may contain an object twice, such as a list of rows and the current row. An item that is added to this
row after a resume must appear in both.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np

__all__ = ["AGAIN", "SharedContainers", "node_at"]

#: tag of a reference to another place in the same document
AGAIN = "again"
#: mutable types, for which identity matters
_KINDS = frozenset({list, dict, set, deque, bytearray, OrderedDict, Counter, defaultdict, np.ndarray})


class SharedContainers:
    """The containers that one walk over a tree has met, with their documents."""

    def __init__(self) -> None:
        self._met: dict[int, tuple[object, Any]] = {}  # with the containers: none is freed, and its address taken
        self._again: dict[int, list[dict[str, Any]]] = {}  # by document: the places to be told where it stands

    def note(self, value: object, document: Any) -> None:
        """Record the document of `value`."""
        if type(value) in _KINDS:
            self._met[id(value)] = value, document

    def again(self, value: object) -> dict[str, Any] | None:
        """Return a reference if `value` was met before, which `complete` fills; else None."""
        if (met := self._met.get(id(value))) is None:
            return None
        node: dict[str, Any] = {"$": AGAIN}
        self._again.setdefault(id(met[1]), []).append(node)
        return node

    def complete(self, root: Any) -> None:
        """Write into all references the path of the first occurrence in the document `root`."""
        nodes: list[tuple[Any, tuple[str | int, ...]]] = [(root, ())] if self._again else []
        while nodes:
            node, place = nodes.pop()
            for again in self._again.get(id(node), ()):
                again["at"] = [*place]
            inside = node.items() if isinstance(node, dict) else enumerate(node)
            nodes += [(child, (*place, key)) for key, child in inside if isinstance(child, (dict, list))]


def node_at(root: Any, place: list[str | int]) -> Any:
    """Return the node of the document `root` at `place`."""
    for key in place:
        root = root[key]
    return root
