"""Every error the engine raises on purpose.

EngineError                 the world ends with 1: a retry may help
├── UserError               ends with 2: the job or the user's code is wrong, a retry cannot help
│   ├── JobError            faults of a job or of the Trainer's arguments, all of them at once
│   ├── UserCodeError       an exception in the user's module, data or callback
│   ├── NotExact            something that cannot be resumed exactly
│   ├── UnsupportedState    state of a type that cannot be written, named by its path
│   ├── IdentityChanged     the snapshot belongs to another module, data, seed, ...
│   ├── LossNotFinite       the loss is NaN or infinite
│   ├── RunHeld             another process trains the run now
│   ├── NoLoss              a training step returned none
│   └── StrategyUnavailable the strategy's library or hardware is not here
├── StopRequested           ends with 75: stopped on request, a retry resumes
├── Superseded              ends with 75: a newer generation advances this run
├── Overtaken               another champion was promoted meanwhile; a retry compares with it
├── WorldError              the processes could not start, meet or stay together
└── SnapshotError
    ├── SnapshotMissing     nothing committed there
    ├── SnapshotDamaged     committed, but its bytes are not those that were written
    │   └── SnapshotUnreadable  they cannot be read
    ├── StoreFull           the disk or the quota is full: a retry helps once there is room
    ├── StoreSilent         the store did not answer for as long as it was waited for
    ├── ReadBackDiffers     ends with 2: a part did not load the state that it saved
    └── StoreUnsafe         ends with 2: the store cannot promise what was asked of it

StopSignal is no EngineError and no Exception: a signal may come anywhere, also inside a `try` that takes every
Exception for a failure of what it tried.
"""

import copyreg
import os
from collections.abc import Iterator, Sequence
from functools import partialmethod
from pathlib import Path
from traceback import StackSummary, TracebackException
from typing import Any, ClassVar

from midstride.engine.formatting import format_count, format_message

__all__ = [
    "EngineError",
    "IdentityChanged",
    "JobError",
    "LossNotFinite",
    "NoLoss",
    "NotExact",
    "Overtaken",
    "ReadBackDiffers",
    "RunHeld",
    "SnapshotDamaged",
    "SnapshotError",
    "SnapshotMissing",
    "SnapshotUnreadable",
    "StopRequested",
    "StopSignal",
    "StoreFull",
    "StoreSilent",
    "StoreUnsafe",
    "StrategyUnavailable",
    "Superseded",
    "UnsupportedState",
    "UserCodeError",
    "UserError",
    "WorldError",
]


class EngineError(Exception):
    """Base of every error raised on purpose."""

    #: what a process ends with when this error ends it
    exit_code: ClassVar[int] = 1

    def add_line(self, line: str) -> None:
        """Add a line to the end of the message."""
        self.args = (f"{self}\n{line}",)

    def as_instance_of_cause(self) -> "EngineError":
        """Return this error as an instance of its cause's class too; itself without a cause.

        So an exception that ends a trial of a search goes through a fit. After Ray's
        `RayTaskError.as_instanceof_cause`: `exit_code`, the message and where it came from stay.

        >>> error = UserCodeError("raised in Module.training_step")
        >>> error.__cause__ = KeyError("colour")
        >>> isinstance(error.as_instance_of_cause(), KeyError)
        True
        """
        cause, kind = self.__cause__, type(self)
        if not isinstance(cause, Exception):
            return self
        try:
            error: EngineError = _derived(kind, type(cause))(str(self))
        except Exception:  # a class that cannot be derived from, or made with a message alone
            return self
        vars(error).update({**vars(cause), "__notes__": []} | vars(self))
        return error


class UserError(EngineError):
    """The job or the user's code is wrong; a retry cannot help."""

    exit_code = 2


class JobError(UserError):
    """Faults of a job or of the Trainer's arguments, all of them at once.

    >>> print(JobError.of("job.yaml", ["seed: a whole number is needed, not 'x'", "name: is missing"]))
    2 faults in job.yaml:
      seed: a whole number is needed, not 'x'
      name: is missing
    """

    @classmethod
    def of(cls, where: object, faults: Sequence[str]) -> "JobError":
        """Word all `faults` found in `where`."""
        lines = [f"{format_count(len(faults), 'fault')} in {where}:", *faults]
        return cls("\n".join(lines).replace("\n", "\n  "))


class UserCodeError(UserError):
    """Exception in the user's module, data or callback; its traceback opens the message."""

    @classmethod
    def of(cls, where: str, error: BaseException) -> "UserCodeError":
        """Word `error`, raised in `where`, with the frames of the user's own code only."""
        shown = TracebackException.from_exception(error)
        for link in _chain(shown):
            theirs = [frame for frame in link.stack if not _is_ours(frame.filename)]
            libraries = [frame for frame in link.stack if not frame.filename.startswith(_HERE)]
            others = [] if isinstance(error, SyntaxError) else libraries or list(link.stack)  # its message says where
            link.stack = StackSummary.from_list(theirs or others)
        return cls(f"{format_message(''.join(shown.format()))}{_looked_for(error)}raised in {where}")


class NotExact(UserError):
    """Something that cannot be resumed exactly, found before training starts."""


class UnsupportedState(UserError):
    """State of a type that cannot be written, named by its path in the tree."""


class IdentityChanged(UserError):
    """The snapshot belongs to a run with another identity: both values are in the message."""


class LossNotFinite(UserError):
    """The loss is NaN or infinite; snapshots before it are kept."""


class NoLoss(UserError):
    """A training step returned no loss where there has to be one."""


class StrategyUnavailable(UserError):
    """The chosen strategy's library or hardware is not on this machine."""


class RunHeld(UserError):
    """Another process trains the run now."""


class StopRequested(EngineError):
    """The run has stopped on request; a retry resumes."""

    exit_code = 75

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows in place of a traceback."""
        return [f"midstride: {self}"]


class ReplayEnd(StopRequested):
    """A replay has come to its last step, which ends the fit."""


class StopSignal(BaseException):
    """Raised by a signal handler in the main thread, and converted to `StopRequested`.

    Args:
        message: its text.
        signal: number of the signal, if known.
    """

    def __init__(self, message: str, signal: int | None = None) -> None:
        super().__init__(message)
        self.signal = signal


class Superseded(EngineError):
    """A newer generation advances this run; this world must not."""

    exit_code = 75


class Overtaken(EngineError):
    """Raised if another champion was promoted during a comparison; a retry compares again."""


class WorldError(EngineError):
    """The processes of a run could not start, meet or stay together."""


class SnapshotError(EngineError):
    """A snapshot could not be read or written."""


class SnapshotMissing(SnapshotError):
    """No committed snapshot at the given URL or step."""


class SnapshotDamaged(SnapshotError):
    """A committed snapshot whose bytes are not those that were written."""


class SnapshotUnreadable(SnapshotDamaged):
    """A file of a snapshot cannot be read: the disk, or something else in its place."""


class ReadBackDiffers(SnapshotError):
    """Raised if a part's reloaded state differs from its saved one.

    Ends with 2, since a retry would differ too.
    """

    exit_code = 2


class StoreSilent(SnapshotError):
    """The store did not answer for as long as it was waited for."""


class StoreFull(SnapshotError):
    """The disk or the quota of the store is full; once there is room, the run continues."""


class StoreUnsafe(SnapshotError):
    """The store lacks a needed guarantee, such as exclusive creation; ends with 2."""

    exit_code = 2


class _Derived(type):
    """Class of errors with the bases of `_derived`, by which it is pickled."""


def _derived(kind: type[EngineError], cause: type[Exception]) -> type:
    """Return a class of errors that are `kind` and `cause`, and are worded as `kind`."""
    plain = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__init__", "__str__")}
    make: Any = _Derived if issubclass(_Derived, type(cause)) else type(cause)  # such as that of abstract classes
    derived: type = make(kind.__name__, (kind, cause), {**plain, "__reduce__": partialmethod(_reduced, kind)})
    return derived


def _by_bases(derived: _Derived) -> Any:
    """Pickles a result of `_derived`; a class that is derived from one by its name."""
    return (_derived, derived.__bases__) if "__reduce__" in vars(derived) else derived.__qualname__


copyreg.pickle(_Derived, _by_bases)


def _reduced(error: EngineError, kind: type[EngineError]) -> tuple[type[EngineError], tuple[str]]:
    """Pickles an error whose class may not exist in the receiving process."""
    return kind, (str(error),)


_HERE = f"{Path(__file__).parent}{os.sep}"


def _looked_for(error: BaseException) -> str:
    """Return a line on the folder in which a relative path was looked for."""
    path = error.filename if isinstance(error, FileNotFoundError) else None
    is_relative = isinstance(path, str) and path and not Path(path).is_absolute()
    return f"this path is relative to the current folder, {Path.cwd()}\n" if is_relative else ""


def _is_ours(filename: str) -> bool:
    libraries = f"{os.sep}site-packages{os.sep}torch{os.sep}", f"{os.sep}importlib{os.sep}", "<frozen importlib"
    return filename.startswith(_HERE) or any(library in filename for library in libraries)


def _chain(shown: TracebackException) -> Iterator[TracebackException]:
    """Yield an exception and those it came from."""
    link: TracebackException | None = shown
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__
