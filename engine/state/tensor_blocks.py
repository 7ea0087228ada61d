"""Remembers encoded dicts of tensors, so that unchanged ones are not encoded again.

Most of a state with many tensors is such dicts: the weights, and an optimizer's state of each parameter. Their entries
in the document depend on the forms and the addresses of the tensors, which are compared in a fraction of the time.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn

from midstride.engine.state.shared_containers import KnownDocument, SharedContainers
from midstride.engine.state.tensors import Leaves, TensorEntry, columns_of

__all__ = ["TensorBlocks"]

_TENSORS = frozenset({Tensor, nn.Parameter})
_TEXT, _NUMBERS, _DICT = {str}, {int}, {dict}


@dataclass(slots=True)
class _Block:
    """A dict of tensors, or a dict of such dicts, as it was encoded.

    Args:
        kind: its class.
        names: its keys, those of the dicts in it, and the numbers of these.
        entries: entries of the tensors.
        columns: their addresses and forms.
        document: the document of the dict. It is not changed any more: a thread may still be writing it.
        inner: the documents of the dicts in it.
    """

    kind: type
    names: list[list[Any]]
    entries: list[TensorEntry]
    columns: list[tuple[list[Any], ...]]
    document: KnownDocument
    inner: list[Any]


class TensorBlocks:
    """Dicts of tensors by path, from earlier encodings of a tree."""

    def __init__(self) -> None:
        self._blocks: dict[str, _Block] = {}

    def clear(self) -> None:
        """Forget them, since the tensors will be in other places of the file."""
        self._blocks.clear()

    def add(self, path: str, value: dict[Any, Any], document: Any, own: Leaves, shared: SharedContainers) -> None:
        """Record the `document` of `value` if that is a dict of strided tensors, or of such dicts.

        Args:
            path: where `value` is in the tree.
            value: any dict.
            document: its document.
            own: the tensors in it that were not met before.
            shared: the dicts that the encoder has met, those in `value` included.
        """
        self._blocks.pop(path, None)
        found = _tensors_in(value)
        names = None if found is None else _names(value, found[0])
        if found is None or names is None:
            return
        inner, tensors = found
        if [*map(id, tensors)] != [*map(id, own.tensors)]:  # some are sparse, on other devices, or were met before
            return
        self._blocks[path] = _Block(
            type(value), names, own.entries, columns_of(tensors), KnownDocument(document), shared.documents(inner)
        )

    def again(self, path: str, value: dict[Any, Any], leaves: Leaves, shared: SharedContainers) -> Any:
        """Return the document of `value` if all is as it was; else None.

        Args:
            path: where `value` is in the tree.
            value: any dict.
            leaves: where the tensors in it are added.
            shared: where the dicts in it are noted.
        """
        block = self._blocks.get(path)
        if block is None or type(value) is not block.kind or (found := _tensors_in(value)) is None:
            return None
        inner, tensors = found
        if _names(value, inner) != block.names or not shared.are_new(inner):
            return None
        try:
            if columns_of(tensors) != block.columns:
                return None
        except RuntimeError:  # one has no strides or no address now
            return None
        leaves.extend(block.entries, tensors)
        shared.note_all(inner, block.inner)
        return block.document


def _tensors_in(value: dict[Any, Any]) -> tuple[list[dict[Any, Any]], list[Tensor]] | None:
    """Return the dicts in `value` and their tensors; no dicts if `value` itself holds tensors."""
    items = [*value.values()]
    inner = items if _kinds(items) == _DICT else []
    tensors = [*chain.from_iterable(map(dict.values, inner))] if inner else items
    return (inner, tensors) if tensors and _TENSORS.issuperset(map(type, tensors)) else None


def _names(value: dict[Any, Any], inner: list[dict[Any, Any]]) -> list[list[Any]] | None:
    """Return the keys of `value`, and of the dicts in it; None unless they are text or numbers."""
    names = [*chain.from_iterable(inner)]
    is_plain = _kinds(value) in (_TEXT, _NUMBERS) and _kinds(names) <= _TEXT
    return [[*value], names, [*map(len, inner)]] if is_plain else None


def _kinds(values: Iterable[Any]) -> set[type]:
    return {*map(type, values)}
