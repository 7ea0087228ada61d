"""Builds loggers from their names and arguments."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from midstride.engine.config.import_paths import call_with, load_attribute
from midstride.engine.config.loggers import LOGGERS, LoggerOptions
from midstride.engine.config.overrides import override_faults
from midstride.engine.errors import EngineError, JobError
from midstride.engine.loggers.base import Logger

__all__ = ["build_logger", "logger_errors"]


def build_logger(options: LoggerOptions, key: str = "loggers", folder: str = "") -> Logger:
    """Return the logger that `options` name.

    Args:
        options: path and arguments of the logger.
        key: key of the options, for messages.
        folder: folder of the code; by default that of this program.

    Raises:
        JobError: a library is not installed, the logger cannot be imported, takes other arguments, is not a Logger, or
            lacks methods of a Logger.
        UserCodeError: importing or building it raises.
    """
    spec = LOGGERS.get(options.path)
    if spec is not None and find_spec(spec.needs) is None:
        raise JobError(f'{key}: {spec.needs} is not installed: pip install "midstride[{spec.extra}]"')
    if spec is not None:
        module, _, name = spec.path.partition(":")
        make = getattr(import_module(module), name)
    else:
        make = load_attribute(options.path, folder or sys.path[0] or Path.cwd(), key)
    if isinstance(make, type) and issubclass(make, Logger) and (faults := override_faults(make)):
        raise JobError("\n".join(f"{key}: {fault}" for fault in faults))
    logger = call_with(make, options.args, options.path, f"{key}.args")
    if not isinstance(logger, Logger):
        raise JobError(f"{key}: {options.path} gives a {type(logger).__name__}; a Logger is needed")
    return logger


def logger_errors(loggers: Sequence[LoggerOptions]) -> list[str]:
    """Return messages on loggers that cannot be built; trackers are not contacted."""
    errors: list[str] = []
    for number, options in enumerate(loggers):
        try:
            build_logger(options, f"loggers.{number}")
        except EngineError as error:
            errors += str(error).splitlines() if isinstance(error, JobError) else [str(error)]
    return errors
