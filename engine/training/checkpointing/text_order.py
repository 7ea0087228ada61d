"""The order of sets of text: another in each interpreter, unless PYTHONHASHSEED fixes how text hashes.

`midstride fit` and `train` fix it. In a script a set of text may have another order in each life and on each rank: no
snapshot can bring it back, so where the user's files make a set, it is said.
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
_MAKES_SETS = frozenset({"set", "frozenset", "hash"})
#: functions whose value does not depend on the order of what they are given
_ORDERLESS = frozenset({"sorted", "len", "min", "max", "any", "all", "bool", "isinstance"})
#: places in one message
_MOST = 3


def text_order_facts() -> dict[str, int]:
    """Return what tells whether another process hashes text as this one does."""
    return {_KEY: hash(_KEY)}


def text_order_warnings(
    kinds: Iterable[type], saved: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return what is to be said of sets of text: nothing if all hash alike, or if the user's files make none.

    Args:
        kinds: classes of the training.
        saved: facts of the snapshot that it goes on from; empty if there is none.
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
        f"{format_names(places, _MOST)} make sets. Where their order decides what is trained, sort them, or start "
        "the script with PYTHONHASHSEED=0 each time"
    ]


def _places(kinds: Iterable[type]) -> Iterator[str]:
    """Yield where the user's files make a set whose order may matter, as "file.py:12"."""
    modules = user_modules(kinds)
    if (main := sys.modules.get("__main__")) is not None and main not in modules and is_user_module("__main__"):
        modules.append(main)
    for module in modules:
        for name, source in _sources(module):
            yield from (f"{name}:{line}" for line in sets_in(source))


def _sources(module: types.ModuleType) -> Iterator[tuple[str, str]]:
    """Yield the source of a module, or of each cell of a notebook, with what it is called."""
    cells = vars(module).get("In")
    if module.__name__ == "__main__" and isinstance(cells, list):
        yield from ((f"cell {number}", str(cell)) for number, cell in enumerate(cells))
        return
    try:
        name, source = Path(inspect.getsourcefile(module) or "").name, inspect.getsource(module)
    except (OSError, TypeError, ValueError, SyntaxError):  # typed at a prompt, gone, or of no encoding that is known
        return
    yield name, source


def sets_in(source: str) -> list[int]:
    """Return the lines on which `source` makes a set, or asks for a hash, and does not at once sort or count it.

    >>> sets_in("words = set(text)")
    [1]
    >>> sets_in("words = sorted(set(text)) if kind in {'a', 'b'} else {1, 2}")
    []
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a cell with commands of IPython's
        return []
    orderless = {id(part) for node in ast.walk(tree) for part in _orderless_parts(node)}
    return sorted({node.lineno for node in _sets(tree) if id(node) not in orderless})


def _sets(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _MAKES_SETS
        is_of_numbers = isinstance(node, ast.Set) and all(map(_is_number, node.elts))
        if is_call or (isinstance(node, (ast.Set, ast.SetComp)) and not is_of_numbers):
            yield cast("ast.expr", node)


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not isinstance(node.value, (str, bytes))


def _orderless_parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what stands in `node` where no order matters: what is compared, or is sorted or counted."""
    if isinstance(node, ast.Compare):
        yield from (node.left, *node.comparators)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ORDERLESS:
        for argument in node.args:
            yield from ast.walk(argument)
