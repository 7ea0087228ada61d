"""Containers that stand in a tree of state more than once: written at the first place, and pointed to at the others.

A `state_dict` often says one thing twice: all rows, and the open one of them. What is added to that one after a resume
belongs in both.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np

__all__ = ["AGAIN", "SharedContainers", "node_at"]

#: the tag of what stands elsewhere in the same document
AGAIN = "again"
#: what can change in place, and tells so that it is one and not two
_KINDS = frozenset({list, dict, set, deque, bytearray, OrderedDict, Counter, defaultdict, np.ndarray})


class SharedContainers:
    """The containers that one walk over a tree has met, with the documents that were made of them."""

    def __init__(self) -> None:
        self._met: dict[int, tuple[object, Any]] = {}  # with the containers: none is freed, and its address taken
        self._again: dict[int, list[dict[str, Any]]] = {}  # by document: the places to be told where it stands

    def note(self, value: object, document: Any) -> None:
        """Note what was made of `value`."""
        if type(value) in _KINDS:
            self._met[id(value)] = value, document

    def again(self, value: object) -> dict[str, Any] | None:
        """Return what stands for `value` if it was met before, to be completed at the end."""
        if (met := self._met.get(id(value))) is None:
            return None
        node: dict[str, Any] = {"$": AGAIN}
        self._again.setdefault(id(met[1]), []).append(node)
        return node

    def complete(self, root: Any) -> None:
        """Write into all that `again` gave where in the document `root` the first place is."""
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
