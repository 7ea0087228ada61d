"""Origin of code: the user, a library, Python, or midstride."""

import os
import sys
import sysconfig
import types
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["is_python_file", "is_user_class", "is_user_file", "is_user_module", "is_written_by_user", "module_of"]

_PYTHON = tuple({*(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib")), str(Path(os.__file__).parent)})
_INSTALLED = tuple({sysconfig.get_paths()[key] for key in ("purelib", "platlib")})
#: of other Pythons, whose packages this one may see: of the user's, Debian's, those of the environment's base
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_OURS = str(Path(__file__).resolve().parent)


@cache  # asked of every class at every snapshot, and to resolve a path asks the file system for each of its folders
def is_user_file(path: str) -> bool:
    """Return whether the file at `path` is neither Python's, nor a library's, nor ours."""
    libraries = path.startswith(("<", *_PYTHON)) or _is_installed(path)
    return not (libraries or str(Path(path).resolve()).startswith(_OURS))


def is_python_file(path: str) -> bool:
    """Return whether the file at `path` is Python's own, which calls on behalf of its caller."""
    return path.startswith(("<", *_PYTHON)) and not _is_installed(path)


def _is_installed(path: str) -> bool:
    return path.startswith(_INSTALLED) or any(folder in path for folder in _PACKAGES)


def is_user_class(kind: type) -> bool:
    """Return whether a class was written by the user."""
    return is_user_module(module_of(kind))


def module_of(kind: type) -> str:
    """Return the name of a class's module, by its methods if code has set another value or none."""
    name: Any = kind.__module__
    if isinstance(name, str):
        return name
    functions = (getattr(value, "fget", value) for value in vars(kind).values())
    return next((str(one.__module__) for one in functions if isinstance(one, types.FunctionType)), "")


def is_written_by_user(owner: object, name: str) -> bool:
    """Return whether a class of the user's, not of a library, defines the method `name`.

    Classes that adapt Lightning's objects, which hold the original class as `_written`, do not count.
    """
    kinds = (kind for kind in type(owner).__mro__ if name in vars(kind) and "_written" not in vars(kind))
    return is_user_class(next(kinds, type(owner)))


def is_user_module(name: str) -> bool:
    """Return whether the module called `name` was written by the user."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return is_user_file(file) if file else name == "__main__"
