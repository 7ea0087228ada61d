"""References written from the code: keys of a job, commands, events, and arguments of Lightning's Trainer."""

import json
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from inspect import signature
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from midstride.engine import Trainer
from midstride.engine.config.job import TrainingJob
from midstride.engine.config.lightning_names import LIGHTNING_OPTIONS, NEUTRAL_OPTIONS
from midstride.flows.cli import app
from midstride.tasks.events import EVENTS

__all__ = ["commands", "events", "job", "lightning", "on_page_markdown"]

#: what the schema needs of a deployed job, and a file has anyhow
_IN_A_FILE = {"folder": "the file's own", "snapshots": "its defaults", "snapshots.url": "`runs`, beside the file"}


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put each reference where its name stands as a comment."""
    for name, text in (("job", job), ("commands", commands), ("events", events), ("lightning", lightning)):
        if (mark := f"<!-- reference: {name} -->") in markdown:
            markdown = markdown.replace(mark, text())
    return markdown


def commands() -> str:
    """Return every command with its options, as `--help` has them."""
    text: str = app.generate_docs(heading_level=1)
    text = text[text.index("\n## midstride ") :]  # without the lists of all commands
    text = re.sub(r"^#+ (?=midstride )", "## ", text, flags=re.MULTILINE)
    # Cyclopts takes the program that asks, `python -m mkdocs`, for the one that is described.
    text = re.sub(r"^(midstride .*?) -m \w+", r"\1", text, flags=re.MULTILINE)
    return text.replace("```console", "```text").replace("**Parameters**:\n\n", "").strip()


def events() -> str:
    """Return a section for each event, with a table of its payload."""
    parts = []
    for kind in EVENTS:
        fields = [f"| `{name}` | {field.description} |" for name, field in kind.model_fields.items()]
        parts.append("\n".join((f"## `{kind.event}`\n\n{kind.__doc__}\n\n| payload | |\n|---|---|", *fields)))
    return "\n\n".join(parts)


def lightning() -> str:
    """Return the arguments of Lightning's Trainer: those taken, those without effect, and what replaces the others."""
    theirs = [*signature(import_module("lightning").Trainer).parameters]
    others = [name for name in theirs if name not in signature(Trainer).parameters]
    answered = {name: values for name in others if (values := NEUTRAL_OPTIONS[name]) is not None}
    return "\n".join(
        (
            f"- taken: {_quoted(name for name in theirs if name not in others)}",
            f"- taken, and without effect: {_quoted(name for name in others if name not in answered)}",
            "\n| others | taken if | else |\n|---|---|---|",
            *(f"| `{name}` | {_quoted(values)} | {LIGHTNING_OPTIONS[name]} |" for name, values in answered.items()),
        )
    )


def _quoted(values: Iterable[object]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def job() -> str:
    """Return a table of every group of the job's keys, from the schema that forms are drawn from."""
    schema = TrainingJob.model_json_schema()
    return "\n".join(_group(schema, schema["$defs"], ""))


def _group(schema: dict[str, Any], models: dict[str, Any], path: str) -> Iterator[str]:
    heading = f"`{path}`" if path else "The job"
    yield f"## {heading}\n\n{schema['description']}\n\n| key | value | default | meaning |\n|---|---|---|---|"
    below = []
    for name, field in schema["properties"].items():
        key = f"{path}.{name}" if path else name
        if group := _model(field, models):
            below.append((key, group))
            keys = f"[keys of its own](#{path.replace('.', '')}{name})"
            what = f"a list, each with {keys}" if "items" in field else keys
        else:
            what = _what(field)
        needed = name in (*schema.get("required", ()), *schema.get("else", {}).get("required", ()))
        default = _IN_A_FILE.get(key) or ("**needed**" if needed else _default(field, group))
        meaning = field.get("description") or (group or {}).get("description", "")
        yield f"| `{name}` | {what} | {default} | {field.get('title', name)}. {meaning} |"
    yield ""
    for key, group in below:
        yield from _group(group, models, key)


def _model(field: dict[str, Any], models: dict[str, Any]) -> dict[str, Any] | None:
    """Return the group that stands under a key, if one does."""
    for branch in (field, field.get("items", {}), *field.get("anyOf", ()), *field.get("allOf", ())):
        if reference := branch.get("$ref"):
            found: dict[str, Any] = models[reference.rpartition("/")[2]]
            return found if "properties" in found else None
    return None


def _default(field: dict[str, Any], group: dict[str, Any] | None) -> str:
    default = field.get("default")
    if default is None or default in ("", [], {}):
        return "none"
    if group is not None:
        return "its defaults"
    return f"`{json.dumps(default)}`" if isinstance(default, (bool, list, dict)) else f"`{_number(default)}`"


def _what(field: dict[str, Any]) -> str:
    """Return the text that says which values a key takes."""
    branches = [branch for branch in field.get("anyOf", [field]) if branch.get("type") != "null"]
    words = " or ".join(dict.fromkeys(_one(branch) for branch in branches))
    return f"{words}, or `null`" if len(branches) < len(field.get("anyOf", ())) else words


def _one(branch: dict[str, Any]) -> str:
    if values := branch.get("enum") or ([branch["const"]] if "const" in branch else []):
        return ", ".join(f"`{value}`" for value in values)
    kinds = {"integer": "whole number", "number": "number", "string": "text", "boolean": "`true` or `false`"}
    if branch.get("type") == "array":
        return "a list"
    if branch.get("type") == "object":
        return "keys and values"
    if branch.get("type") not in kinds:
        return "anything"
    bounds = [("minimum", "from {}"), ("exclusiveMinimum", "above {}"), ("maximum", "to {}")]
    said = [words.format(_number(branch[bound])) for bound, words in bounds if bound in branch]
    return " ".join([kinds[branch["type"]], *said])


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and value != 1.0 else str(value)
