"""References between the places of a tree that hold the same container."""

import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any
from uuid import uuid4

import numpy as np

__all__ = ["AGAIN", "KnownDocument", "SharedContainers", "json_of"]

#: tag of a reference to another place in the same document
AGAIN = "again"
#: mutable types, for which identity matters
_KINDS = frozenset({list, dict, set, deque, bytearray, OrderedDict, Counter, defaultdict, np.ndarray})


class KnownDocument:
    """A part of a document that an earlier one had, too: its text is made once.

    Args:
        content: the part, which does not change any more.
    """

    def __init__(self, content: Any) -> None:
        self.content = content

    @cached_property
    def text(self) -> str:
        """The JSON text of the part."""
        return _text_of(self.content)


def json_of(document: Any) -> bytes:
    """Return a document as JSON; the text of known parts is not made anew."""
    return _text_of(document).encode()


def _text_of(document: Any) -> str:
    known: list[str] = []
    place = uuid4().hex  # no other text has it

    def put(part: KnownDocument) -> str:
        known.append(part.text)
        return place

    halves = json.dumps(document, allow_nan=False, default=put).split(f'"{place}"')
    return "".join([text for pair in zip(halves, [*known, ""], strict=True) for text in pair])


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
            if isinstance(node, KnownDocument):
                node = node.content
            inside = node.items() if isinstance(node, dict) else enumerate(node)
            nodes += [(child, (*place, key)) for key, child in inside if isinstance(child, (dict, list, KnownDocument))]
