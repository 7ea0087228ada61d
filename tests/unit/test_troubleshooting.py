"""The pages on troubleshooting and on state quote messages that the sources still have."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
#: the first cell of each row
QUOTED = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
#: the second cells of the table of what no snapshot holds
WARNED = re.findall(r"^\| [^|]+ \| `([^`]+)` \|", (ROOT / "docs/state.md").read_text(), re.MULTILINE)
VALUE = re.compile(r"%[sd]|%\.1f|%g|\{\w+\}")


def messages() -> set[str]:
    """Return the texts of the sources, `…` where values are put in."""
    found = set()
    for path in (path for part in ("engine", "flows", "tasks") for path in (ROOT / part).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(VALUE.sub("…", node.value))
    return found


@pytest.fixture(scope="module")
def said() -> str:
    return "\n".join(messages())


def test_twenty_messages_are_quoted() -> None:
    assert len(QUOTED) == len(set(QUOTED)) >= 20
    assert len(QUOTED) == len(re.findall(r"^\| `", PAGE, re.MULTILINE))


def test_each_kind_of_state_that_is_lost_has_its_warning() -> None:
    assert len(WARNED) == len(set(WARNED)) >= 5


@pytest.mark.parametrize("message", [*QUOTED, *WARNED])
def test_a_quoted_message_is_one(said: str, message: str) -> None:
    assert message in said
