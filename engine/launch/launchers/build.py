"""Launchers by name: nothing is imported until its name is asked for."""

from pathlib import Path

from midstride.engine.config.import_paths import load_attribute
from midstride.engine.config.launchers import LAUNCHERS
from midstride.engine.errors import JobError
from midstride.engine.launch.launchers.base import Launcher

__all__ = ["build_launcher"]


def build_launcher(name: str, folder: Path | str) -> Launcher:
    """Return the launcher called `name`.

    Args:
        name: of a row, or "package.module:Class" of your own.
        folder: of the job: its modules come first.

    Raises:
        JobError: no such launcher, or what is named is none.
        StrategyUnavailable: what it starts processes with is not installed.
        UserCodeError: importing it raises.
    """
    kind = load_attribute(LAUNCHERS.get(name, name), folder, "world.launcher")
    if not (isinstance(kind, type) and issubclass(kind, Launcher)):
        raise JobError(f"world.launcher: {name} is {kind!r}, not a class that inherits midstride.engine.Launcher")
    launcher: Launcher = kind()
    return launcher
