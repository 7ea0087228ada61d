"""Job files: YAML as people mean it, choices set from outside, and what is wrong with them."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from midstride.engine.config.lightning_names import HABITS

__all__ = ["apply_overrides", "faults_of", "parse_yaml", "read_mapping"]


class _Constructor(SafeConstructor):
    """YAML 1.2, less its dates, which are text; a key given twice is refused with both lines."""

    def check_mapping_key(self, node: Any, key_node: Any, mapping: Any, key: Any, value: Any) -> bool:
        if key in mapping:
            first = next(other.start_mark.line for other, _ in node.value if other.value == key_node.value)
            message = f"{key!r} is given twice, first in line {first + 1}"
            raise MarkedYAMLError(problem=message, problem_mark=key_node.start_mark)
        return True


for _tag in ("timestamp", "value"):  # 2026-01-31 and "=": as JSON has them, which a deployed job goes through
    _Constructor.add_constructor(f"tag:yaml.org,2002:{_tag}", SafeConstructor.construct_yaml_str)


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML document.

    >>> parse_yaml("{lr: 1e-3, nodes: 1:4, on: no}")
    {'lr': 0.001, 'nodes': '1:4', 'on': 'no'}
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    return yaml.load(text)


def read_mapping(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the mapping in the YAML file `path`, and what is wrong with the file."""
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, ["there is no such file"]
    except (OSError, UnicodeDecodeError) as error:
        return {}, [f"cannot be read: {error}"]
    except MarkedYAMLError as error:
        return {}, [_of_yaml(error)]
    except YAMLError as error:
        return {}, [f"is not YAML: {error}"]
    if not isinstance(document, dict):
        return {}, ["is empty" if document is None else f"keys and values are needed, not {document!r}"]
    return document, []


def _of_yaml(error: MarkedYAMLError) -> str:
    """Say where a file stops being YAML, and where what is wrong began."""
    mark, began = error.problem_mark, error.context_mark
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    problem = str(error.problem).replace("character '\\t' that cannot start any token", "a tab; indent with spaces")
    since = f" {error.context}, which began in line {began.line + 1}" if error.context and began else ""
    return f"{where}{problem}{since}"


def apply_overrides(document: dict[str, Any], overrides: Iterable[str], option: str = "--set") -> list[str]:
    """Set each "a.b=value" of `overrides` in `document`, values read as YAML; return what is wrong with them."""
    faults = []
    for override in overrides:
        key, equals, text = override.partition("=")
        *path, last = key.strip().split(".")
        if not equals or not all([*path, last]):
            faults.append(f"{option} {override}: write it as key=value, such as trainer.max_epochs=2")
            continue
        try:
            value = parse_yaml(text)
        except YAMLError as error:
            faults.append(f"{option} {override}: the value is not YAML: {getattr(error, 'problem', error)}")
            continue
        place = _group(document, path)
        if place is None:
            faults.append(f"{option} {override}: {'.'.join(path)} has no keys")
        else:
            place[last] = value
    return faults


def _group(document: dict[str, Any], path: Sequence[str]) -> dict[str, Any] | None:
    """The mapping at `path`, made if it is not there; None if something else is."""
    place: Any = document
    for name in path:
        if place.get(name) is None:
            place[name] = {}
        place = place[name]
        if not isinstance(place, dict):
            return None
    found: dict[str, Any] = place
    return found


#: pydantic's words -> those of people
_PLAINLY = {
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


def faults_of(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """Word every fault that pydantic found, one line for each key."""
    places = _places(model)
    messages: dict[str, list[str]] = {}
    for detail in error.errors():
        path = _path(detail["loc"], places)
        for message in _words(detail, path, places):
            if message not in messages.setdefault(path, []):
                messages[path].append(message)
    return [f"{path}: {_joined(several)}" if path else _joined(several) for path, several in messages.items()]


def _joined(messages: Sequence[str]) -> str:
    """One sentence out of the branches of a union: they end in the same "not 'x'"."""
    if len(messages) == 1:
        return messages[0]
    heads = [message.rpartition(", not ")[0] or message for message in messages]
    return f"{'; or '.join(heads)}, not {messages[-1].rpartition(', not ')[2]}"


def _words(detail: Mapping[str, Any], path: str, places: Sequence[str]) -> list[str]:
    message = str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] == "missing":
        return ["is missing"]
    if detail["type"] == "extra_forbidden":
        return [_unknown(path, places)]
    if detail["type"] == "value_error":
        return [message]
    given = "null" if detail["input"] is None else repr(detail["input"])
    if detail["type"] in ("model_type", "dict_type"):
        below = [_leaf(place) for place in places if path and place.rpartition(".")[0] == path]
        return [f"should be keys and values, not {given}" + f"; its keys are {', '.join(below)}" * bool(below)]
    for theirs, ours in _PLAINLY.items():
        message = message.replace(theirs, ours)
    return [f"{message}, not {given}"]


def _unknown(path: str, places: Sequence[str]) -> str:
    """Say where a key that has no place here belongs, or what may stand here."""
    group, _, name = path.rpartition(".")
    if homes := [place for place in places if _leaf(place) == name]:
        above = homes[0].rpartition(".")[0]
        return f"has its place {f'under {above}' if above else 'at the top of the job'}: {homes[0]}"
    if name in HABITS:
        return f"is unknown here: {HABITS[name]}"
    here = [place for place in places if place.rpartition(".")[0] == group]
    for near, cutoff in ((here, 0.6), (places, 0.8)):
        if close := get_close_matches(name, [_leaf(place) for place in near], n=1, cutoff=cutoff):
            return f"is unknown, did you mean {next(place for place in near if _leaf(place) == close[0])}?"
    return f"is unknown; here may stand {', '.join(sorted(map(_leaf, here)))}"


def _leaf(place: str) -> str:
    return place.rpartition(".")[2]


def _places(model: type[BaseModel]) -> list[str]:
    """Every key path of the job; groups come before what is in them."""
    places: list[str] = []
    for name, field in model.model_fields.items():
        below = [inner for group in _models(field.annotation) for inner in group.model_fields]
        places += [name, *(f"{name}.{inner}" for inner in below)]
    return places


def _models(annotation: Any) -> list[type[BaseModel]]:
    inner = [annotation, *getattr(annotation, "__args__", ())]
    return [one for one in inner if isinstance(one, type) and issubclass(one, BaseModel)]


def _path(location: Sequence[int | str], places: Sequence[str]) -> str:
    """The key path of a fault, without what pydantic adds to a key: the names of a union's branches."""
    names = [str(part) for part in location]
    for length in range(len(names) - 1, 0, -1):
        path = ".".join(names[:length])
        if path in places and not any(place.startswith(f"{path}.") for place in places):
            return path
    return ".".join(names)
