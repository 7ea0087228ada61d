"""Imports objects by "package.module:attribute", with the folder of the job importable."""

import importlib
import inspect
import re
import sys
from difflib import get_close_matches
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from midstride.engine.errors import EngineError, JobError, UserCodeError

__all__ = ["IMPORT_PATH", "call_with", "import_path", "load_attribute", "make_importable"]


def make_importable(folder: Path | str) -> None:
    """Put `folder` first in `sys.path`."""
    sys.path[:] = [str(folder), *(path for path in sys.path if path != str(folder))]


#: "package.module:attribute"
IMPORT_PATH = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"


def import_path(spec: str) -> str:
    """Return `spec` if it has the form of an import path.

    Raises:
        ValueError: it is not of the form "package.module:attribute".
    """
    if not re.fullmatch(IMPORT_PATH, spec):
        raise ValueError(f'"package.module:attribute" is needed, such as model:Classifier, not {spec!r}')
    if ".py:" in spec:
        raise ValueError(f"a module is named without .py: {spec.replace('.py:', ':')}, not {spec!r}")
    return spec


def load_attribute(spec: str, folder: Path | str, key: str) -> Any:
    """Return the object named by `spec`, "package.module:attribute"; `folder` comes first.

    Raises:
        JobError: there is no such module or attribute; the message lists what there is, and names `key`, under which
            the job has `spec`.
        UserCodeError: importing it raises; the message starts with the traceback.
    """
    name, _, attribute = spec.partition(":")
    make_importable(folder)
    _forget_stale(name.partition(".")[0], str(folder))
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise JobError(f"{key}: {_no_module(error.name, folder)}") from None
        raise UserCodeError.of(f"import of {name}", error) from error
    except SystemExit as error:
        raise JobError(
            f"importing {name} ended the program with {error.code}. Read command lines below "
            'if __name__ == "__main__":, and pass settings as arguments of the job'
        ) from None
    except Exception as error:
        raise UserCodeError.of(f"import of {name}", error) from error
    if not hasattr(module, attribute):
        raise JobError(f"{key}: {_no_attribute(module, attribute)}")
    return getattr(module, attribute)


def call_with(make: Any, arguments: dict[str, Any], spec: str, key: str) -> Any:
    """Return `make(**arguments)`.

    Raises:
        JobError: `make`, which the job names by `spec`, is no class and no function, or does not take these
            arguments. The message has one line for each fault, with `key`, under which the job has them.
        UserCodeError: it raises; the message starts with the traceback.
    """
    if faults := _argument_faults(spec, make, arguments, key):
        raise JobError("\n".join(faults))
    try:
        return make(**arguments)
    except EngineError:
        raise
    except Exception as error:
        raise UserCodeError.of(f"building {spec}", error) from error


def _forget_stale(top: str, folder: str) -> None:
    """Remove `top` from `sys.modules` if it was imported from elsewhere than `folder`.

    Nothing changes if `folder` has no such module.

    Two jobs in one process may both have a `model.py`; each must get its own.
    """
    loaded = sys.modules.get(top)
    found = PathFinder.find_spec(top, [folder])
    if loaded is None or found is None or found.origin is None or getattr(loaded, "__file__", None) == found.origin:
        return
    for name in [name for name in sys.modules if name == top or name.startswith(f"{top}.")]:
        del sys.modules[name]


def _no_module(missing: str, folder: Path | str) -> str:
    paths = [*Path(folder).glob("*.py"), *(path.parent for path in Path(folder).glob("*/__init__.py"))]
    here = sorted(path.stem for path in paths)
    there = f"{folder} has {', '.join(here[:12])}" if here else f"{folder} has no Python files"
    return f"there is no module {missing!r}{_close(missing, here)}; {there}"


def _no_attribute(module: ModuleType, attribute: str) -> str:
    own = [name for name, value in vars(module).items() if inspect.isclass(value) or inspect.isfunction(value)]
    here = [name for name in own if vars(module)[name].__module__ == module.__name__]
    public = sorted(name for name in here or own if not name.startswith("_"))
    where = getattr(module, "__file__", None) or module.__name__
    return f"{where} has no {attribute!r}{_close(attribute, public)}; it has {', '.join(public[:12]) or 'no classes'}"


def _argument_faults(spec: str, make: Any, arguments: dict[str, Any], key: str) -> list[str]:
    if not callable(make):
        return [f"{spec} is a {type(make).__name__}; a class or a function is needed"]
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):  # written in C: it will speak for itself
        return []
    named = {name: one for name, one in parameters.items() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    open_ended = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    faults = [
        f"{key}.{name}: {spec} takes no {name!r}{_close(name, list(named))}; it takes {', '.join(named) or 'nothing'}"
        for name in arguments
        if name not in named and not open_ended
    ]
    needed = [name for name, one in named.items() if one.default is one.empty and name not in arguments]
    return [*faults, *(f"{key}.{name}: is missing; {spec} needs it" for name in needed)]


def _close(name: str, known: list[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f", did you mean {close[0]!r}?" if close else ""
