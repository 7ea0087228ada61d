"""Messages on pydantic's errors in options: for each key fault, value and way out."""

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from midstride.engine.config.lightning_names import LIGHTNING_OPTIONS, LIGHTNING_VALUES

__all__ = ["validation_errors"]

#: pydantic's wording -> that of a reader who knows no pydantic
_MESSAGES = {
    "Input should be": "should be",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid boolean": "true or false",
    "a valid tuple": "a list",
    "greater than or equal to": "at least",
    "greater than": "more than",
    "less than or equal to": "at most",
    ", unable to parse string as a number": "",
    ", unable to interpret input": "",
    "String should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]*$'": "should be letters, digits and . _ -, a letter or "
    "digit first",
}
#: a name that is still taken -> its name now
_OLD_NAMES = {"replace_sampler_ddp": "use_distributed_sampler", "retries": "retries_without_progress"}


def validation_errors(error: ValidationError, model: type[BaseModel], group: str = "") -> list[str]:
    """Return a message for each key of `model` that pydantic refused, in order of fields.

    Args:
        error: what validating `model` raised.
        model: a group of options, which may hold others.
        group: the key that `model` stands under, where the messages name it.
    """
    optional = _optional_by_path(model)
    known_paths = [*optional]
    messages: dict[str, list[str]] = {}
    for detail in error.errors():
        path = _path(detail["loc"], known_paths)
        for message in _reasons(detail, path, optional):
            if message not in messages.setdefault(path, []):
                messages[path].append(message)
    named = [(".".join(filter(None, (group, path))), _joined(several)) for path, several in messages.items()]
    return [f"{path}: {message}" if path else message for path, message in named]


def _joined(messages: Sequence[str]) -> str:
    """Return one sentence of the messages on a union's branches, which end in "not 'x'"."""
    if len(messages) == 1:
        return messages[0]
    heads = [message.rpartition(", not ")[0] or message for message in messages]
    return f"{'; or '.join(heads)}, not {messages[-1].rpartition(', not ')[2]}"


def _reasons(detail: Mapping[str, Any], path: str, optional: Mapping[str, bool]) -> list[str]:
    known_paths = [*optional]
    message = str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] == "missing":
        return ["is missing"]
    if detail["type"] == "extra_forbidden":
        return [_unknown(path, detail["input"], known_paths)]
    if detail["type"] == "value_error":
        return [message]
    given = "null" if detail["input"] is None else repr(detail["input"])
    kinds, way = LIGHTNING_VALUES.get(_leaf(path), ((), ""))
    if isinstance(detail["input"], kinds):
        return [f"{way}, not {given}"]
    if detail["type"] in ("model_type", "dict_type"):
        return [_no_mapping(given, path, known_paths)]
    for theirs, ours in _MESSAGES.items():
        message = message.replace(theirs, ours)
    if detail["input"] is None and optional.get(_without_numbers(path)):
        message = f"{message}, or left out"
    return [f"{message}, not {given}" + "; YAML's None is null" * (detail["input"] == "None")]


def _no_mapping(given: str, path: str, known_paths: Sequence[str]) -> str:
    below = [_leaf(inner) for inner in known_paths if path and inner.rpartition(".")[0] == _without_numbers(path)]
    if given == "null" and below:
        return f"has no keys: indent them below it, such as {below[0]}"
    return f"should be keys and values, not {given}" + f"; its keys are {', '.join(below)}" * bool(below)


def _unknown(path: str, value: object, known_paths: Sequence[str]) -> str:
    """Return a message about an unknown key: where it belongs, or which keys there are."""
    group, _, name = path.rpartition(".")
    group = _without_numbers(group)
    if homes := [known for known in known_paths if _leaf(known) == name]:
        above = homes[0].rpartition(".")[0]
        return f"has its place {f'under {above}' if above else 'at the top of the job'}: {homes[0]}"
    if name in _OLD_NAMES:
        return f"is the old name of {_OLD_NAMES[name]}, which is given too: leave it out"
    if name in LIGHTNING_OPTIONS:
        return f"is unknown here: {LIGHTNING_OPTIONS[name]}{'' if value else '; or leave it out'}"
    here = [known for known in known_paths if known.rpartition(".")[0] == group]
    for near, cutoff in ((here, 0.6), (known_paths, 0.8)):
        if get_close_matches(name, [_leaf(known) for known in near], n=1, cutoff=cutoff):
            closest = max(near, key=lambda known: SequenceMatcher(None, _leaf(known), name).ratio())
            return f"is unknown, did you mean {closest}?"
    return f"is unknown; here may stand {', '.join(sorted(map(_leaf, here)))}"


def _without_numbers(path: str) -> str:
    """The path of a key in each item of a list, with equal items."""
    return ".".join(key for key in path.split(".") if not key.isdigit())


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def _optional_by_path(model: type[BaseModel]) -> dict[str, bool]:
    """Return for each key path of the job whether it is optional, groups before their contents."""
    optional: dict[str, bool] = {}
    for name, field in model.model_fields.items():
        optional[name] = not field.is_required()
        for group in _models(field.annotation):
            optional |= {f"{name}.{inner}": not below.is_required() for inner, below in group.model_fields.items()}
    return optional


def _models(annotation: Any) -> list[type[BaseModel]]:
    inner = [annotation, *getattr(annotation, "__args__", ())]
    return [one for one in inner if isinstance(one, type) and issubclass(one, BaseModel)]


def _path(location: Sequence[int | str], known_paths: Sequence[str]) -> str:
    """Return a fault's key path without the names of union branches that pydantic appends."""
    names = [str(name) for name in location]
    for length in range(len(names) - 1, 0, -1):
        path = ".".join(names[:length])
        if path in known_paths and not any(inner.startswith(f"{path}.") for inner in known_paths):
            return path
    return ".".join(names)
