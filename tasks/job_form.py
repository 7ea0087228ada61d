"""Form of a job in Prefect's UI: frequent fields in view, all others behind a tab.

The UI draws the alternatives of `anyOf` as tabs, and opens the one whose properties are those of the value. It reads
neither `allOf` for that choice nor `then`, by which the server checks a job whatever the tab.
"""

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["folded"]

Schema = dict[str, Any]

#: option of a job in view -> in a group, its options in view
_IN_VIEW: dict[str, Sequence[str]] = {
    "args": (),
    "module_args": (),
    "data_args": (),
    "weights": (),
    "seed": (),
    "trainer": ("max_epochs", "max_steps", "precision", "accumulate_grad_batches"),
    "world": ("strategy", "processes"),
    "snapshots": ("every_steps",),
}


def folded(whole: Schema, resolve: Callable[[Schema], Schema]) -> Schema:
    """Return the schema of a job as the UI shows it.

    Args:
        whole: reference to the schema of `TrainingJob`.
        resolve: returns the schema that a reference names.
    """
    properties = resolve(whole)["properties"]
    in_view = {name: _in_view(properties[name], names, resolve) for name, names in _IN_VIEW.items()}
    return {
        "title": "Job",
        "anyOf": [
            {"title": "Basics", "type": "object", "properties": in_view},
            {"title": "All options", "allOf": [whole]},
            {"title": "JSON"},  # it takes any value: `then` checks it, and names the option that is wrong
        ],
        "if": {},
        "then": whole,
    }


def _in_view(option: Schema, names: Sequence[str], resolve: Callable[[Schema], Schema]) -> Schema:
    if not names:
        return option
    group = resolve(_reference(option))
    titles: Schema = {key: option[key] for key in ("title", "description") if key in option}
    return {**titles, "type": "object", "properties": {name: group["properties"][name] for name in names}}


def _reference(option: Schema) -> Schema:
    """Return the reference in the schema of a group, which may be None."""
    alternatives = [option, *option.get("allOf", ()), *option.get("anyOf", ())]
    return next({"$ref": one["$ref"]} for one in alternatives if "$ref" in one)
