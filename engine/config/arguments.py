"""The texts in the arguments of a job, which are JSON: walked here, where no torch is loaded."""

from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["map_texts", "texts_in"]


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
