"""One attempt of a checked run, in its own process: no global state reaches the next one."""

import copy
import json
import logging
import os
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from midstride.engine.code_origin import is_python_file, is_user_file
from midstride.engine.errors import EngineError, UserError
from midstride.engine.modules.module import TrainingModule
from midstride.engine.objects.digest import object_digest
from midstride.engine.processes.child_processes import ChildProcesses
from midstride.engine.testing.batch_journal import BatchJournal
from midstride.engine.training.trainer import Trainer

__all__ = ["ChildRun", "NondeterminismTracer"]

Factory = Any | Callable[[], Any]


@dataclass(frozen=True)
class ChildRun:
    """One attempt, and the files that it writes to its folder.

    Args:
        folder: where the run, the journal, the result and, if it failed, the error are written.
    """

    folder: Path

    @property
    def run(self) -> str:
        """Folder of the run."""
        return str(self.folder / "run")

    @property
    def journal(self) -> Path:
        """Path of the file with the digests of its batches."""
        return self.folder / "journal.jsonl"

    def result(self) -> dict[str, Any]:
        """Return its result: "digest", "warnings" of the engine, and "nondeterministic calls"."""
        return dict(json.loads((self.folder / "result.json").read_text()))

    def train(
        self,
        module: Factory,
        data: Factory,
        options: Mapping[str, Any],
        *,
        watched: bool = False,
        in_new_interpreter: bool = False,
    ) -> "ChildRun":
        """Train to the end, from the newest snapshot of the run if there is one; return self.

        Args:
            module: a module, of which a copy trains, or a function that makes it.
            data: likewise.
            options: arguments of the Trainer; `callbacks` can also be a function that makes them.
            watched: whether nondeterministic calls are recorded.
            in_new_interpreter: start a new interpreter instead of a fork. It hashes strings differently and lists
                folders in reverse; `module`, `data` and `options` are pickled.

        Raises:
            AssertionError: the attempt failed; the message is its error.
        """
        self.folder.mkdir(exist_ok=True)
        environment = {**os.environ, **(other_hash_seed() if in_new_interpreter else {})}
        arguments = (module, data, options, watched, in_new_interpreter)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer Pythons warn of forks in general
            method: Any = "spawn" if in_new_interpreter else "fork"
            with ChildProcesses(self._run, arguments, [environment], method) as process:
                while process.running():
                    process.wait(60.0)
        if code := process.exit_codes()[0]:
            path = self.folder / "error.txt"
            error = path.read_text() if path.exists() else f"the process ended with {code}"
            where = ", resumed in a new interpreter," if in_new_interpreter else ""
            raise AssertionError(
                f"this{where} does not train to the end of the check, so nothing can be compared:\n{error}"
            )
        return self

    def _run(
        self, module: Factory, data: Factory, options: Mapping[str, Any], watched: bool, in_new_interpreter: bool
    ) -> None:
        try:
            if in_new_interpreter:
                reverse_listings()
                logging.getLogger("midstride").addHandler(logging.NullHandler())  # it prints nothing, as a fork does
            torch.set_num_threads(1)  # a pool of threads does not survive a fork
            self._train(module, data, options, watched)
        except BaseException as error:
            ours = isinstance(error, EngineError)
            (self.folder / "error.txt").write_text(str(error) if ours else traceback.format_exc())
            raise SystemExit(1) from None

    def _train(self, module: Factory, data: Factory, options: Mapping[str, Any], watched: bool) -> None:
        given: Any = options.get("callbacks", ())
        made: Any = given() if callable(given) else given
        callbacks = [*made, BatchJournal(self.journal)]
        settings: dict[str, Any] = {**options, "callbacks": callbacks}
        trainer = Trainer(**settings)
        warned = _WarningCollector()
        tracer = NondeterminismTracer()
        logging.getLogger("midstride").addHandler(warned)
        with tracer if watched else nullcontext():
            made, source = _fresh(module), _fresh(data)
            trainer.fit(made, source, run=self.run)
        result = {
            "digest": object_digest(made, source, trainer.callbacks[:-1]),
            "warnings": warned.lines,
            "nondeterministic calls": tracer.calls,
        }
        (self.folder / "result.json").write_text(json.dumps(result))


class _WarningCollector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _fresh(made: Factory) -> Any:
    if isinstance(made, TrainingModule) or not callable(made):
        return copy.deepcopy(made)
    fresh = made()
    if fresh is None:
        raise UserError(f"{made!r} returned None; a module, or data, is needed")
    return fresh


def other_hash_seed() -> dict[str, str]:
    """Return a variable that makes a new interpreter hash strings differently."""
    return {"PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}


def reverse_listings() -> None:
    """Reverse the results of `os.listdir` and `os.scandir`, and so of `glob` and `pathlib`."""
    listdir, scandir = os.listdir, os.scandir

    def reversed_listdir(path: Any = ".") -> list[Any]:
        return listdir(path)[::-1]

    class ReversedScandir:
        def __init__(self, path: Any = ".") -> None:
            with scandir(path) as found:
                self._entries = iter([*found][::-1])

        def __enter__(self) -> Iterator[Any]:
            return iter(self)

        def __exit__(self, *_: object) -> None:
            pass

        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            return next(self._entries)

        def close(self) -> None:
            pass

    replaced: Any = os
    replaced.listdir, replaced.scandir = reversed_listdir, ReversedScandir


_CALLS: dict[Any, str] = {
    **{getattr(time, name): f"time.{name}()" for name in ("time", "time_ns", "perf_counter", "perf_counter_ns")},
    **{getattr(time, name): f"time.{name}()" for name in ("monotonic", "monotonic_ns", "process_time", "localtime")},
    os.urandom: "os.urandom()",
    os.getpid: "os.getpid()",
    id: "id()",
}
_METHODS = {"datetime.now": "datetime.now()", "datetime.utcnow": "datetime.utcnow()", "date.today": "date.today()"}


class NondeterminismTracer:
    """Records nondeterministic calls of user code in this thread, a line of `calls` per place.

    It slows an attempt down many times (`sys.setprofile`), so it is used only after a comparison has failed.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __enter__(self) -> "NondeterminismTracer":
        sys.setprofile(self._profile)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call" or (name := _nondeterministic(function)) is None:
            return
        caller: FrameType | None = frame
        while caller is not None and is_python_file(caller.f_code.co_filename):
            caller = caller.f_back
        if caller is None or not is_user_file(caller.f_code.co_filename):
            return
        if function is id and caller is not frame:  # by copy.deepcopy and json, whose results do not depend on it
            return
        code = caller.f_code
        line = f"{name} in {code.co_qualname} ({code.co_filename.rpartition('/')[2]}:{caller.f_lineno})"
        if line not in self.calls:
            self.calls.append(line)


def _nondeterministic(function: Any) -> str | None:
    """Return how a message calls `function`, if its results differ each time; else None."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, random.Random):
        own = owner is not random._inst
        return "a random.Random of its own" if own and function.__name__ in ("random", "getrandbits") else None
    try:
        return _CALLS.get(function) or _METHODS.get(getattr(function, "__qualname__", ""))
    except TypeError:  # a method of an unhashable object
        return None
