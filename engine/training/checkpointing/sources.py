"""Digests of the user's source code, by module, or by class and function in a notebook, to warn of changes."""

import inspect
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import xxhash

from midstride.engine.objects.function_code import digest_of_code
from midstride.engine.objects.user_modules import functions_of, names_in, user_modules

__all__ = ["source_changes", "source_digests"]


def source_digests(kinds: Collection[type]) -> dict[str, str]:
    """Return name -> digest of each of the user's modules that the classes `kinds` use.

    For a module without a file, such as a notebook, the digests are of the classes and functions that `kinds` use.
    """
    code: dict[str, str] = {}
    for module in user_modules(kinds):
        try:
            code[_name(module)] = inspect.getsource(module)
        except (OSError, TypeError, ValueError, SyntaxError):  # no file, a deleted one, or an unknown encoding
            code.update(_interactive_code(module, kinds))
    return {name: xxhash.xxh3_64_hexdigest(found.encode()) for name, found in code.items()}


def _name(module: types.ModuleType) -> str:
    """Return the name by which a module is imported, also if it runs as `__main__`."""
    return Path(module.__file__ or "").stem if module.__name__ == "__main__" else module.__name__


def _interactive_code(module: types.ModuleType, kinds: Iterable[type]) -> Iterator[tuple[str, str]]:
    """Yield name and code of the classes and functions of `module` that `kinds` refer to, directly or indirectly."""
    here, found = vars(module), set[str]()
    queue: list[type | types.FunctionType] = [*kinds]
    while queue:
        one = queue.pop()
        if one.__module__ != module.__name__ or one.__qualname__ in found:
            continue
        found.add(one.__qualname__)
        functions = [*functions_of(one)]
        yield one.__qualname__, "".join(digest_of_code(function.__code__) for function in functions)
        named = [here.get(name) for function in functions for name in names_in(function.__code__)]
        queue += [value for value in named if isinstance(value, type | types.FunctionType)]
        queue += one.__bases__ if isinstance(one, type) else ()


def source_changes(saved: object, running: Mapping[str, str]) -> list[str]:
    """Return a warning on modules whose code has changed since the snapshot, or [].

    Modules that only one of them has are ignored: the module that refers to them has changed as well.
    """
    before = saved if isinstance(saved, Mapping) else {}  # older snapshots have one digest of one module
    if not (changed := sorted(name for name in running if before.get(name, running[name]) != running[name])):
        return []
    be = "have" if len(changed) > 1 else "has"
    return [
        f"{', '.join(changed)} {be} changed since the snapshot was taken: from here on the code as it is now is "
        "trained. If that is not meant, put it back, or start another run"
    ]
