"""The collate_fn that a pass over the data began with, if training has set another one since."""

import copy
import types
from typing import Any

import torch

from midstride.engine.objects.containers import MISSING
from midstride.engine.objects.function_code import code_digest
from midstride.engine.objects.plain_values import kind_name
from midstride.engine.objects.restore import GraphRestore
from midstride.engine.objects.user_modules import function_called
from midstride.engine.objects.walk import GraphWalk
from midstride.engine.state.object_nodes import Instance, kind_text

__all__ = ["collate_node", "collate_of"]

_PATH = "loader/collate_fn"


def collate_node(collate: Any, walk: GraphWalk) -> Any:
    """Return the node of a collate_fn.

    Args:
        collate: collate_fn of the current pass.
        walk: walk that has visited the objects that it may share with others.
    """
    return copy.deepcopy(walk.node(collate, _PATH))


def collate_of(node: Any, known: list[Any], walk: GraphWalk, anchors: dict[str, object]) -> Any:
    """Return the collate_fn that `node` describes, which shares no state with those in `known`.

    MISSING if there is neither such a function nor an object of its class.

    Args:
        node: result of `collate_node`, or node of a collate_fn from a walk over a loader.
        known: existing collate_fns, whose code it may have.
        walk: walk that has visited the objects that it may share with others.
        anchors: anchors of that walk, by name.
    """
    for number, collate in enumerate(known):
        walk.node(collate, f"{number}")
    made = _SeparateRestore(walk, anchors).put(node, MISSING, _PATH)
    if made is not MISSING:
        return made
    kind = node.kind if isinstance(node, Instance) else None
    return next((one for one in known if _name(one) == kind), MISSING)  # of a library: nodes hold only its name


def _name(function: Any) -> str:
    name = getattr(function, "__qualname__", None)
    return kind_name(type(function)) if name is None else kind_text(function.__module__, name)


class _SeparateRestore(GraphRestore):
    """Builds new objects from nodes, and does not change existing ones.

    Args:
        walk: walk over existing objects.
        anchors: objects that are not copied, by name.
    """

    def __init__(self, walk: GraphWalk, anchors: dict[str, object]) -> None:
        super().__init__(walk, anchors, torch.device("cpu"))
        self._functions = [value for _, value in walk.seen.values() if isinstance(value, types.FunctionType)]
        self._copies: dict[int, object] = {}

    def use(self, live: Any, path: str, *, fits: bool) -> bool:
        """Return whether `live` was made here."""
        return id(live) in self._copies and super().use(live, path, fits=fits)

    def is_left_out(self, live: Any) -> bool:
        """Return whether there is a live object, which is kept unchanged."""
        return live is not MISSING

    def put(self, node: Any, live: Any, path: str) -> Any:
        """Return the object that `node` describes; the live one for functions is ignored."""
        is_code = isinstance(node, Instance) and node.form == "function"
        return super().put(node, MISSING if is_code else live, path)

    def find_function(self, kind: str, code: str | None) -> types.FunctionType | None:
        """Return a copy, with new cells, of a function with that name and code; None if there is none."""
        alike = (one for one in self._functions if _name(one) == kind and (code is None or code_digest(one) == code))
        found = next(alike, None) or function_called(kind)
        if found is None or not (found.__closure__ or vars(found)):
            return found if found is None else self._register(found)
        cells = tuple(types.CellType(cell.cell_contents) for cell in found.__closure__ or ())
        made = types.FunctionType(found.__code__, found.__globals__, found.__name__, found.__defaults__, cells)
        made.__qualname__, made.__module__ = found.__qualname__, found.__module__
        made.__kwdefaults__ = found.__kwdefaults__
        vars(made).update(vars(found))
        return self._register(made)

    def _register(self, function: types.FunctionType) -> types.FunctionType:
        self._copies[id(function)] = function
        return function
