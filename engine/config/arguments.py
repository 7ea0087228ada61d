"""Arguments of a job, which are JSON on their way to ranks and deployments. No torch."""

import math
import os
from collections.abc import Callable, Iterator
from typing import Annotated, Any

from pydantic import AfterValidator

__all__ = ["Arguments", "map_texts", "texts_in"]


def _as_json(value: Any, path: str = "", above: tuple[int, ...] = ()) -> Any:
    """Return `value` as JSON would give it back: paths as texts, tuples as lists.

    Raises:
        ValueError: JSON cannot hold it, or would give back something else.
    """
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if fault := _fault(value, above):
        raise ValueError(f"{f'{path} is' if path else 'these are'} {fault}")
    above = (*above, id(value))
    if isinstance(value, dict):
        return {key: _as_json(item, f"{path}.{key}".lstrip("."), above) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item, f"{path}.{index}", above) for index, item in enumerate(value)]
    return value


def _fault(value: Any, above: tuple[int, ...]) -> str:
    """Return the fault of one value, or "". `above` has the ids of the values around it."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}, which JSON has no number for: use null, or a text that your code reads"
    if id(value) in above:
        return "part of what it holds itself"
    if isinstance(value, dict):
        odd = next((key for key in value if not isinstance(key, str)), "")
        return "" if isinstance(odd, str) else f"a mapping with the key {odd!r}: put it in quotes"
    if value is None or isinstance(value, (int, float, str, list, tuple)):
        return ""
    return f"a {type(value).__name__}, {value!r}: a job travels as JSON, of texts, numbers, lists and mappings"


#: keyword arguments for a class or function that a job names
Arguments = Annotated[dict[str, Any], AfterValidator(_as_json)]


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return `value` with `change` applied to every text in it, except to keys.

    >>> map_texts({"folder": "./a", "files": ["b", 1]}, str.upper)
    {'folder': './A', 'files': ['B', 1]}
    """
    if isinstance(value, dict):
        return {key: map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [map_texts(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def texts_in(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the key path and the value of every text in `value`, whose own key path is `path`.

    >>> [*texts_in({"files": ["b", 1]}, "data_args")]
    [('data_args.files.0', 'b')]
    """
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from texts_in(item, f"{path}.{key}")
