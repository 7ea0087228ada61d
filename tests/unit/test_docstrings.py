"""Every public name is documented, and a docstring's arguments are those that there are."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
Definition = ast.FunctionDef | ast.ClassDef


@cache
def trees() -> dict[str, ast.Module]:
    """Return every file's syntax, by its path."""
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text())
        for package in ("engine", "tasks", "flows")
        for path in sorted((ROOT / package).rglob("*.py"))
    }


@cache
def classes() -> dict[str, ast.ClassDef]:
    """Return every class by its name."""
    return {node.name: node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def definitions() -> Iterator[tuple[str, Definition, ast.ClassDef | None]]:
    """Yield every function and class at the top of a file or in a class, with where it stands and its class."""
    for file, tree in trees().items():
        for node in tree.body:
            if isinstance(node, Definition):
                yield f"{file}: {node.name}", node, None
            if isinstance(node, ast.ClassDef):
                yield from (
                    (f"{file}: {node.name}.{inner.name}", inner, node)
                    for inner in node.body
                    if isinstance(inner, Definition)
                )


def is_public(name: str) -> bool:
    return not any(part.startswith("_") for part in name.partition(": ")[2].split("."))


def needs_docstring(node: Definition, kind: ast.ClassDef | None) -> bool:
    """Whether neither the definition nor what it overrides or sets has a docstring."""
    is_setter = any(ast.unparse(decorator).endswith(".setter") for decorator in node.decorator_list)
    overrides = kind is not None and any(documents(base, node.name) for base in bases(kind))
    return not (ast.get_docstring(node) or is_setter or overrides)


def bases(kind: ast.ClassDef) -> list[ast.ClassDef]:
    """Return the classes of ours that `kind` inherits directly."""
    return [classes()[name] for base in kind.bases if (name := ast.unparse(base)) in classes()]


def documents(kind: ast.ClassDef, method: str) -> bool:
    """Whether `kind`, or what it inherits, says what the method does."""
    own = (node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == method)
    return any(map(ast.get_docstring, own)) or any(documents(base, method) for base in bases(kind))


def test_every_public_name_is_documented() -> None:
    assert [file for file, tree in trees().items() if not ast.get_docstring(tree)] == []
    assert [name for name, node, kind in definitions() if is_public(name) and needs_docstring(node, kind)] == []


def arguments(docstring: str) -> list[str]:
    """Return the names under `Args:`."""
    block = docstring.partition("Args:\n")[2].partition("\n\n")[0]
    lines = re.findall(r"^    ([a-z_*][a-z_, *]*):", block, re.MULTILINE)
    return [name for line in lines for name in line.replace("*", "").split(", ")]


def parameters(node: Definition) -> set[str]:
    """Return the names that a caller may give; of a class without a constructor, its fields."""
    if isinstance(node, ast.FunctionDef):
        by = node.args
        return {one.arg for one in (*by.posonlyargs, *by.args, *by.kwonlyargs, by.vararg, by.kwarg) if one}
    made = [inner for inner in node.body if isinstance(inner, ast.FunctionDef) and inner.name == "__init__"]
    annotated = [inner.target for inner in node.body if isinstance(inner, ast.AnnAssign)]
    fields = {target.id for target in annotated if isinstance(target, ast.Name)}
    return parameters(made[0]) if made else fields.union(*map(parameters, bases(node)))


def test_arguments_of_docstrings_are_those_that_there_are() -> None:
    described = {name: (arguments(ast.get_docstring(node) or ""), parameters(node)) for name, node, _ in definitions()}
    assert sum(len(names) for names, _ in described.values()) > 500, "arguments are found"
    assert {name: extra for name, (names, there) in described.items() if (extra := {*names} - there)} == {}
