"""References between the places of a tree that hold the same container."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

__all__ = ["AGAIN", "SharedContainers"]

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

    def note_all(self, values: Sequence[object], documents: Iterable[Any]) -> None:
        """Record the documents of mutable containers."""
        self._met.update(zip(map(id, values), zip(values, documents, strict=True), strict=True))

    def are_new(self, values: Sequence[object]) -> bool:
        """Return whether no container is twice in `values`, or was met before."""
        numbers = {*map(id, values)}
        return len(numbers) == len(values) and numbers.isdisjoint(self._met)

    def documents(self, values: Iterable[object]) -> list[Any]:
        """Return the documents of containers that were met."""
        return [self._met[id(value)][1] for value in values]

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
