"""Job files: YAML 1.2, and choices set from outside."""

import os
import reprlib
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError

__all__ = ["apply_overrides", "parse_yaml", "read_mapping"]


#: values and levels of a document, each alias counted as a copy
_MOST_VALUES, _MOST_LEVELS = 100_000, 100


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
    document = yaml.load(text)
    if _size(document) > _MOST_VALUES:
        limits = f"{_MOST_VALUES} values or {_MOST_LEVELS} levels"
        raise MarkedYAMLError(problem=f"has more than {limits}, each alias counted as a copy")
    return document


def _text_of(path: Path) -> str:
    if path.is_dir():
        raise IsADirectoryError(path)
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would wait for a writer
    with os.fdopen(handle, encoding="utf-8") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError("it is no regular file")
        return file.read()


def _size(value: Any, *around: Any) -> int:
    """Return the number of values in a document, up to the limit.

    Each alias counts as a copy of its anchor.

    A short document whose aliases name aliases has billions of values, once it is copied.
    """
    if not isinstance(value, dict | list) or any(value is outer for outer in around):
        return 1
    if len(around) >= _MOST_LEVELS:
        return _MOST_VALUES + 1
    count = 1
    for item in value.values() if isinstance(value, dict) else value:
        count += _size(item, *around, value)
        if count > _MOST_VALUES:
            break
    return count


def read_mapping(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the mapping in the YAML file `path`, and messages about the file."""
    try:
        document = parse_yaml(_text_of(path))
    except FileNotFoundError:
        return {}, ["there is no such file. `midstride init FOLDER` writes an example"]
    except IsADirectoryError:
        return {}, [f"is a folder. Name the job's file in it, such as {path / 'job.yaml'}"]
    except (OSError, UnicodeDecodeError) as error:
        return {}, [_unreadable(error)]
    except MarkedYAMLError as error:
        is_python = path.suffix == ".py"
        return {}, ["is Python, and a job is a YAML file: see `midstride init`" if is_python else _of_yaml(error)]
    except YAMLError as error:
        return {}, [f"is not YAML: {error}"]
    except RecursionError:
        return {}, ["is nested deeper than a job can be"]
    if not isinstance(document, dict):
        return {}, ["is empty" if document is None else f"keys and values are needed, not {reprlib.repr(document)}"]
    return document, []


def _unreadable(error: OSError | UnicodeDecodeError) -> str:
    if isinstance(error, OSError):
        return f"cannot be read: {error}"
    line = error.object[: error.start].count(b"\n") + 1
    return f"line {line} is not UTF-8 (byte {error.object[error.start]:#x}): save the file as UTF-8"


def _of_yaml(error: MarkedYAMLError) -> str:
    """Say where a file stops being YAML, and where the fault began."""
    mark, began = error.problem_mark, error.context_mark
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    problem = str(error.problem).replace("character '\\t' that cannot start any token", "a tab; indent with spaces")
    if problem == "but found another document":
        return f"{where}a second document starts (---): a job is one document"
    since = f" {error.context}, which began in line {began.line + 1}" if error.context and began else ""
    return f"{where}{problem}{since}"


def apply_overrides(
    document: dict[str, Any],
    overrides: Iterable[str],
    option: str = "--set",
    example: str = "trainer.max_epochs=2",
) -> list[str]:
    """Set each "a.b=value" of `overrides` in `document` as YAML. Return the faults."""
    faults = []
    for override in overrides:
        key, equals, text = override.partition("=")
        *path, last = key.strip().split(".")
        if not equals or not all([*path, last]):
            faults.append(f"{option} {override}: write it as key=value, such as {example}")
            continue
        try:
            value = parse_yaml(text)
        except YAMLError as error:
            faults.append(f"{option} {override}: the value is not YAML: {getattr(error, 'problem', error)}")
            continue
        group = _group(document, path)
        if group is None:
            faults.append(f"{option} {override}: {'.'.join(path)} has no keys")
        else:
            group[last] = value
    return faults


def _group(document: dict[str, Any], path: Sequence[str]) -> dict[str, Any] | None:
    """The mapping at `path`, made if it is not there; None if something else is."""
    group: Any = document
    for name in path:
        if group.get(name) is None:
            group[name] = {}
        group = group[name]
        if not isinstance(group, dict):
            return None
    found: dict[str, Any] = group
    return found
