"""Calls of the user's code: an exception in it is the user's, and says where."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed

from midstride.engine.errors import EngineError, UserCodeError
from midstride.engine.fault_injection import InjectedFault

__all__ = ["call_user_code"]

_COMMUNICATION = str(Path(torch.distributed.__file__).parent)


def call_user_code(where: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(*arguments)`; an exception in it is the user's, and says where.

    Raises:
        UserCodeError: the function raised.
        Exception: communication with another rank failed in it, or the GPU did; a retry may help.
    """
    try:
        return function(*arguments)
    except (EngineError, InjectedFault):
        raise
    except Exception as error:
        if isinstance(error, torch.AcceleratorError) or _is_of_communication(error):
            raise
        raise UserCodeError.of(where, error) from error


def _is_of_communication(error: Exception) -> bool:
    """Whether `error` came out of torch's communication: a rank that died shows there as the others' exception."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, RuntimeError) and frames[-1].f_code.co_filename.startswith(_COMMUNICATION)
