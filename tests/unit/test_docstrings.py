"""Docstrings are complete and short, their arguments exist, and messages name the thing and the way out."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

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


#: the first line of a docstring, and the first sentence of a message, have at most so many characters
LONGEST_LINE, LONGEST_SENTENCE = 90, 160
#: a line that opens with one of these is no verb or noun phrase
CLAUSE = re.compile(r"(what|where|how|of|with|beside|under|that|which|whose|why|when|who|if) ", re.IGNORECASE)
#: errors that a person has to act on
FOR_PEOPLE = {
    "IdentityChanged", "JobError", "NoLoss", "NotExact", "SnapshotMissing", "StoreFull", "StoreUnsafe",
    "StrategyUnavailable", "UnsupportedState", "UserError", "WorldError",
}  # fmt: skip
#: a value in a message, as many characters as one often has
VALUE = "{a value...}"


def first_lines() -> Iterator[tuple[str, str]]:
    """Yield the place and the first line of every docstring."""
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, *Definition.__args__)) and (text := ast.get_docstring(node)):
                yield f"{file}: {getattr(node, 'name', '')}", text.splitlines()[0]


def is_short_phrase(line: str) -> bool:
    """Whether a line is short and opens with a verb or a noun."""
    return len(line) <= LONGEST_LINE and not CLAUSE.match(line)


def text_of(node: ast.AST) -> str:
    """Return a text in the sources, with `VALUE` for each value; "" for other nodes."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.FormattedValue():
            return VALUE
        case ast.JoinedStr(values=values):
            return "".join(map(text_of, values))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left) + text_of(right)
    return ""


def raised_messages() -> Iterator[tuple[str, str, str]]:
    """Yield the place, the error and the text of each message that is written where it is raised."""
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                text = "".join(map(text_of, node.exc.args[:1]))
                if text:
                    yield f"{file}:{node.lineno}", ast.unparse(node.exc.func), text


def is_message(error: str, text: str) -> bool:
    """Whether a message has a short first sentence; one for people also names the thing and the way out.

    A name is a value, or a word of code. The way out is a part of its own.
    """
    named = VALUE in text or re.search(r"\w[._]\w|[a-z][A-Z]|[A-Z]{2}|\w[(=]", text)
    parted = text.endswith(VALUE) or re.search(r"[:;.] |, or ", text)
    short = len(re.split(r"\. |\n", text)[0]) <= LONGEST_SENTENCE
    return bool(short and (error not in FOR_PEOPLE or (named and parted)))


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("Return the folder of a run.", True),
        ("Folder of a run.", True),
        ("What a run leaves.", False),
        ("Of several loaders, the first.", False),
        ("Return " + "x" * 84, False),
    ],
)
def test_a_first_line_is_a_short_phrase(line: str, right: bool) -> None:
    assert is_short_phrase(line) is right


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (f"{VALUE} has no loader: define Net.train_dataloader()", True),
        (f"{VALUE} has no loader", False),
        ("it failed: try again", False),
        (f"{VALUE}: " + "x" * 150, False),
        (f"{VALUE} has no loader. " + "x" * 150, True),
    ],
)
def test_a_message_names_the_thing_and_the_way_out(text: str, right: bool) -> None:
    assert is_message("UserError", text) is right


def test_docstrings_and_messages_are_short_and_complete() -> None:
    lines, messages = [*first_lines()], [*raised_messages()]
    assert len(lines) > 3000
    assert len(messages) > 400
    assert [place for place, line in lines if not is_short_phrase(line)] == []
    assert [place for place, error, text in messages if not is_message(error, text)] == []
