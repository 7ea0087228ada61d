"""Imports stand-ins for libraries from a folder called `site-packages`, where the user's code is not looked for."""

import importlib
import sys
from pathlib import Path
from typing import Any

__all__ = ["library"]


def library(name: str) -> Any:
    """Return the module `name` of that folder."""
    folder = str(Path(__file__).parent / "site-packages")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)
