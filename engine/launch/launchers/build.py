"""Launchers by name: nothing is imported until its name is asked for."""

import os
from pathlib import Path
from typing import Any

from midstride.engine.config.import_paths import call_with, load_attribute
from midstride.engine.config.job import TrainingJob
from midstride.engine.config.launchers import LAUNCHERS
from midstride.engine.config.overrides import is_own, override_faults
from midstride.engine.errors import EngineError, JobError, UserCodeError
from midstride.engine.launch.launchers.base import Launcher
from midstride.engine.session.session import Session

__all__ = ["build_launcher", "own_launcher_faults", "world_command"]


def build_launcher(name: str, folder: Path | str) -> Launcher:
    """Return the launcher called `name`.

    Args:
        name: of a row, or "package.module:Class" of your own.
        folder: of the job: its modules come first.

    Raises:
        JobError: the launcher does not exist, is no Launcher, or lacks its methods.
        StrategyUnavailable: the program that starts its processes is not installed.
        UserCodeError: importing or building it raises.
    """
    kind = load_attribute(LAUNCHERS.get(name, name), folder, "world.launcher")
    if not (isinstance(kind, type) and issubclass(kind, Launcher)):
        raise JobError(f"world.launcher: {name} is {kind!r}, not a class that inherits midstride.engine.Launcher")
    if faults := override_faults(kind):
        raise JobError("\n".join(f"world.launcher: {fault}" for fault in faults))
    launcher: Launcher = call_with(kind, {}, name, "world.launcher")
    return launcher


def own_launcher_faults(job: TrainingJob) -> list[str]:
    """Return messages on why a launcher of the user's own, which `job` names, cannot be used."""
    if job.world.launched_by in LAUNCHERS:
        return []
    try:
        build_launcher(job.world.launched_by, job.folder)
    except EngineError as error:
        return str(error).splitlines() if isinstance(error, JobError) else [str(error)]
    return []


def world_command(
    launcher: Launcher, session: Session, job: TrainingJob, grace_s: float
) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts a world, and its environment, as `launcher` says them.

    Raises:
        UserCodeError: a launcher of the user's own raised.
        JobError: it returned no command, or no environment.
    """
    name = type(launcher).__name__
    try:
        command: Any = launcher.command(session, job, grace_s=grace_s)
        environment: Any = launcher.environment(session, job, os.environ)
    except Exception as error:
        if isinstance(error, EngineError) or not is_own(type(launcher)):
            raise
        raise UserCodeError.of(f"launcher {name}", error) from error
    if not (isinstance(command, list) and command and _are_texts(command)):
        raise JobError(f"world.launcher: {name}.command returned {command!r}; a list of texts is needed")
    if not isinstance(environment, dict):
        raise JobError(f"world.launcher: {name}.environment returned {environment!r}; a dict of texts is needed")
    if wrong := {key: value for key, value in environment.items() if not _are_texts([key, value])}:
        raise JobError(f"world.launcher: {name}.environment has {wrong!r}; names and values are texts")
    return command, environment


def _are_texts(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)
