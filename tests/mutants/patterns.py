"""Code that is found and replaced as syntax trees: layout, quotes and comments do not count, `...` matches anything."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

#: the parts of a tree that the `...` of a pattern have matched, in order
Captures = list[list[Any]]


@dataclass(frozen=True)
class Definition:
    """A function, class or variable: `block[index]` defines it."""

    block: list[ast.stmt]
    index: int


@dataclass(frozen=True)
class _Match:
    """Where a pattern was found: `items[start:end]` of a list, or the attribute `name` of a node."""

    captures: Captures
    items: list[Any] | None = None
    start: int = 0
    end: int = 0
    node: ast.AST | None = None
    name: str = ""

    def put(self, new: list[Any]) -> None:
        if self.items is not None:
            self.items[self.start : self.end] = new
        elif self.node is not None:
            setattr(self.node, self.name, new[0])


def definitions(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    """Yield each function, class, and variable of a module or class with its qualified name, `Class.method`."""
    yield from _definitions(tree, "", has_variables=True)


def _definitions(node: ast.AST, prefix: str, has_variables: bool) -> Iterator[tuple[str, Definition]]:
    for block in _blocks(node):
        for index, statement in enumerate(block):
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield f"{prefix}{statement.name}", Definition(block, index)
                is_class = isinstance(statement, ast.ClassDef)
                yield from _definitions(statement, f"{prefix}{statement.name}.", is_class)
                continue
            if has_variables and isinstance(statement, ast.Assign | ast.AnnAssign):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                names = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
                yield from ((f"{prefix}{name.id}", Definition(block, index)) for name in names)
            yield from _definitions(statement, prefix, has_variables)
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield from _definitions(part, prefix, has_variables)


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the lists of statements that a node has."""
    for _, value in ast.iter_fields(node):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield value


def replaced(found: list[Definition], old: str, new: str) -> int:
    """Replace the only match of `old` in some definitions, in place, by `new`.

    Both are an expression, or both are statements. A `...` in `old` matches any expression, or any number of statements
    or list items, and `**...` any number of keyword arguments. The n-th `...` of `new` stands for the match of the n-th
    in `old`.

    Returns:
        The number of matches. Unless it is 1, nothing is replaced.

    Raises:
        ValueError: `new` leaves a block empty.
    """
    olds, news = ast.parse(old).body, ast.parse(new).body
    matches: list[_Match] = []
    if len(olds) == len(news) == 1 and isinstance(olds[0], ast.Expr) and isinstance(news[0], ast.Expr):
        pattern, by = olds[0].value, [news[0].value]
        for definition in found:
            matches += _matches_of_expression(pattern, definition.block[definition.index])
    else:
        by = news
        for definition in found:
            matches += _matches_of_statements(olds, definition)
    if len(matches) == 1:
        captures = iter(matches[0].captures)
        matches[0].put(_filled(by, captures))
        if matches[0].items == []:
            raise ValueError(f"write pass: nothing is left of the block of {old!r}")
    return len(matches)


def _matches_of_expression(pattern: ast.expr, tree: ast.AST) -> Iterator[_Match]:
    for node in ast.walk(tree):
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.expr) and (captures := _match(pattern, value)) is not None:
                yield _Match(captures, node=node, name=name)
            for index, item in enumerate(value if isinstance(value, list) else ()):
                if isinstance(item, ast.expr) and (captures := _match(pattern, item)) is not None:
                    yield _Match(captures, items=value, start=index, end=index + 1)


def _matches_of_statements(patterns: list[ast.stmt], definition: Definition) -> Iterator[_Match]:
    statement = definition.block[definition.index]
    if (captures := _match_items(patterns, [statement])) is not None:
        yield _Match(captures, items=definition.block, start=definition.index, end=definition.index + 1)
    for block in [block for node in ast.walk(statement) for block in _blocks(node)]:
        for start, end in combinations(range(len(block) + 1), 2):
            has_gap = any(map(_is_gap, patterns))
            if (has_gap or end - start == len(patterns)) and (
                captures := _match_items(patterns, block[start:end])
            ) is not None:
                yield _Match(captures, items=block, start=start, end=end)


def _match(pattern: Any, node: Any) -> Captures | None:
    """Return what the gaps of a pattern match in a node, or None if it is another tree."""
    if isinstance(pattern, ast.expr) and isinstance(node, ast.expr) and _is_gap(pattern):
        return [[node]]
    if type(pattern) is not type(node):
        return None
    if isinstance(pattern, list):
        return _match_items(pattern, node)
    if not isinstance(pattern, ast.AST):
        return [] if pattern == node else None
    captures: Captures = []
    for name, value in ast.iter_fields(pattern):
        if (more := _match(value, getattr(node, name))) is None:
            return None
        captures += more
    return captures


def _match_items(patterns: list[Any], items: list[Any]) -> Captures | None:
    if not patterns:
        return None if items else []
    for count in range(len(items) + 1) if _is_gap(patterns[0]) else (1,):
        first = [items[:count]] if _is_gap(patterns[0]) else _match(patterns[0], items[0]) if items else None
        if first is not None and (rest := _match_items(patterns[1:], items[count:])) is not None:
            return [*first, *rest]
    return None


def _is_gap(node: Any) -> bool:
    if isinstance(node, ast.Expr) or (isinstance(node, ast.keyword) and node.arg is None):
        node = node.value
    return isinstance(node, ast.Constant) and node.value is ...


def _filled(items: list[Any], captures: Iterator[list[Any]]) -> list[Any]:
    """Return new items with the captured parts in place of their gaps."""
    filled: list[Any] = []
    for item in items:
        if _is_gap(item):
            filled += next(captures)
            continue
        for name, value in ast.iter_fields(item) if isinstance(item, ast.AST) else ():
            if isinstance(value, list):
                setattr(item, name, _filled(value, captures))
            elif isinstance(value, ast.AST):
                setattr(item, name, _filled([value], captures)[0])
        filled.append(item)
    return filled
