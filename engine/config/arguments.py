"""The arguments in a job, which are JSON, as it travels to ranks and deployments: walked here, without torch."""

import math
import os
from collections.abc import Callable, Iterator
from typing import Annotated, Any

from pydantic import AfterValidator

__all__ = ["Arguments", "map_texts", "texts_in"]


def _as_json(value: Any, path: str = "", above: tuple[int, ...] = ()) -> Any:
    """Return `value` as it is read back from JSON, paths and tuples of code as texts and lists.

    Raises:
        ValueError: it would be read back as something else, or not at all.
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
    """Return what is wrong with one value, within those with the ids `above`; nothing if nothing is."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}, which JSON has no number for: say null, or a text that your code reads"
    if id(value) in above:
        return "part of what it holds itself"
    if isinstance(value, dict):
        odd = next((key for key in value if not isinstance(key, str)), "")
        return "" if isinstance(odd, str) else f"a mapping with the key {odd!r}: put it in quotes"
    if value is None or isinstance(value, (int, float, str, list, tuple)):
        return ""
    return f"a {type(value).__name__}, {value!r}: a job travels as JSON, of texts, numbers, lists and mappings"


#: what is passed by name to something of the user's
Arguments = Annotated[dict[str, Any], AfterValidator(_as_json)]


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return `value` with what `change` makes of every text in it, keys aside.

    >>> map_texts({"folder": "./a", "files": ["b", 1]}, str.upper)
    {'folder': './A', 'files': ['B', 1]}
    """
    if isinstance(value, dict):
        return {key: map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [map_texts(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def texts_in(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield every text in `value`, which stands at `path`, with the key path at which it stands.

    >>> [*texts_in({"files": ["b", 1]}, "data_args")]
    [('data_args.files.0', 'b')]
    """
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from texts_in(item, f"{path}.{key}")
