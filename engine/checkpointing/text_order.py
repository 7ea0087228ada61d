"""Warns of sets of strings, whose order differs between interpreters by PYTHONHASHSEED.

`midstride fit` and `train` set it. In a script, sets of strings may have another order in each attempt and on each
rank, which no snapshot can restore. The warning names the places in the user's files that create sets.
"""

import ast
import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from midstride.engine.code_origin import is_user_module
from midstride.engine.formatting import format_names
from midstride.engine.objects.user_modules import user_modules

__all__ = ["text_order_facts", "text_order_warnings"]

_KEY = "text_hash"
_SET_FUNCTIONS = frozenset({"set", "frozenset", "hash"})
#: functions whose result does not depend on the order of their argument
_ORDERLESS = frozenset({"sorted", "len", "min", "max", "any", "all", "bool", "isinstance"})
#: largest number of places in one message
_PLACES = 3


def text_order_facts() -> dict[str, int]:
    """Return a hash of a string, equal in processes with the same PYTHONHASHSEED."""
    return {_KEY: hash(_KEY)}


def text_order_warnings(
    kinds: Iterable[type], saved: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return a warning on sets of strings; [] if hashes agree or user files create no sets.

    Args:
        kinds: classes of the module, data and callbacks.
        saved: facts of the snapshot that is resumed; empty if there is none.
        ranks: `text_order_facts` of every rank.
    """
    hashes = [facts[_KEY] for facts in ranks]
    others = [
        *(["on each rank"] if len({*hashes}) > 1 else []),
        *(["from when the snapshot was taken"] if saved.get(_KEY, hashes[0]) != hashes[0] else []),
    ]
    if not others or not (places := [*_places(kinds)]):
        return []
    return [
        f"strings hash differently {' and '.join(others)}, so sets of strings have another order; "
        f"{format_names(places, _PLACES)} make sets. If their order affects the training, sort them, or always start "
        f"the script with PYTHONHASHSEED=0"
    ]


def _places(kinds: Iterable[type]) -> Iterator[str]:
    """Yield places in the user's files that create sets whose order may matter: "file.py:12"."""
    modules = user_modules(kinds)
    if (main := sys.modules.get("__main__")) is not None and main not in modules and is_user_module("__main__"):
        modules.append(main)
    for module in modules:
        for name, source in _sources(module):
            yield from (f"{name}:{line}" for line in sets_in(source))


def _sources(module: types.ModuleType) -> Iterator[tuple[str, str]]:
    """Yield name and source of a module's file, or of each cell of a notebook."""
    cells = vars(module).get("In")
    if module.__name__ == "__main__" and isinstance(cells, list):
        yield from ((f"cell {number}", str(cell)) for number, cell in enumerate(cells))
        return
    try:
        name, source = Path(inspect.getsourcefile(module) or "").name, inspect.getsource(module)
    except (OSError, TypeError, ValueError, SyntaxError):  # no file, a deleted one, or an unknown encoding
        return
    yield name, source


def sets_in(source: str) -> list[int]:
    """Return lines of `source` that create a set or call `hash` with a result in order.

    Sets that are sorted or counted at once are left out.

    >>> sets_in("words = set(text)")
    [1]
    >>> sets_in("words = sorted(set(text)) if kind in {'a', 'b'} else {1, 2}")
    []
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a cell with IPython commands
        return []
    orderless = {id(part) for node in ast.walk(tree) for part in _orderless_parts(node)}
    return sorted({node.lineno for node in _sets(tree) if id(node) not in orderless})


def _sets(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _SET_FUNCTIONS
        is_of_numbers = isinstance(node, ast.Set) and all(map(_is_number, node.elts))
        if is_call or (isinstance(node, (ast.Set, ast.SetComp)) and not is_of_numbers):
            yield cast("ast.expr", node)


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not isinstance(node.value, (str, bytes))


def _orderless_parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the orderless parts of `node`: operands of comparisons, arguments of `sorted` etc."""
    if isinstance(node, ast.Compare):
        yield from (node.left, *node.comparators)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ORDERLESS:
        for argument in node.args:
            yield from ast.walk(argument)
