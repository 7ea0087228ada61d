"""Calls user code, and converts its exceptions to errors that name the place."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed

from midstride.engine.errors import EngineError, UserCodeError
from midstride.engine.fault_injection import InjectedFault

__all__ = ["call_user_code", "fork_count", "is_retryable", "users_error"]

_DISTRIBUTED = str(Path(torch.distributed.__file__).parent)
#: code there computes: an operation that sharded tensors lack is an error of the user's
_TENSORS = f"{_DISTRIBUTED}{os.sep}tensor{os.sep}"


#: see `fork_count`; asking the kernel for the process id in each call would take longer
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


def call_user_code(where: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(*arguments)`; its exceptions are errors of the user's code, at `where`.

    Raises:
        UserCodeError: the function raised.
        Exception: communication with another rank failed in it, or the GPU did; a retry may help.
    """
    forks = _forks
    try:
        return function(*arguments)
    except BaseException as error:
        if (users := users_error(where, error, forks)) is None:
            raise
        raise users from error


def fork_count() -> int:
    """Return the number of forks between the process that imported this module and this process."""
    return _forks


def users_error(where: str, error: BaseException, forks: int) -> UserCodeError | None:
    """Return the error to raise for `error` of user code; None if it is not the user's fault.

    Args:
        where: the user's function, such as "Net.training_step".
        error: the exception that the function raised.
        forks: `fork_count` before the call. A child that user code has forked since ends here.
    """
    if _forks != forks:
        _end_fork(error)
    is_of_user = isinstance(error, Exception) and not isinstance(error, (EngineError, InjectedFault))
    return UserCodeError.of(where, error) if is_of_user and not is_retryable(error) else None


def _end_fork(error: BaseException) -> NoReturn:
    """End this process, forked by user code, with the message and exit code of `error`.

    It is not a rank, so it must not report an outcome.
    """
    code = error.code if isinstance(error, SystemExit) else 1
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
    elif code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def is_retryable(error: BaseException) -> bool:
    """Return whether `error` of user code came from a GPU or an exchange with other ranks."""
    return isinstance(error, torch.AcceleratorError) or _is_of_communication(error)


def _is_of_communication(error: BaseException) -> bool:
    """Return whether `error` or one of its causes came from an exchange with other ranks."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, RuntimeError) and _is_exchange(link):
            return True
        link = link.__cause__ or link.__context__
    return False


def _is_exchange(error: RuntimeError) -> bool:
    if isinstance(error, torch.distributed.DistError) or type(error).__name__ == "HorovodInternalError":
        return True
    # Its text starts with gloo's file, and may come out where the user's code waits for a result.
    if any("gloo/transport/" in text for text in error.args if isinstance(text, str)):
        return True
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(files) and files[-1].startswith(_DISTRIBUTED) and not files[-1].startswith(_TENSORS)
