"""Ranks as child processes of a Trainer: `ddp_spawn`, `ddp_fork` and `ddp_notebook`.

The children train, and return the weights, the metrics, the state of callbacks and the return value of the call.
"""

import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from midstride.engine.errors import EngineError, StopRequested, UserError, WorldError
from midstride.engine.modules.structure import ModuleStructure
from midstride.engine.modules.torch_internals import children_of
from midstride.engine.objects.attributes import members_of
from midstride.engine.processes.child_processes import ChildProcesses
from midstride.engine.processes.environment import hash_seed
from midstride.engine.processes.loopback import rank_environments
from midstride.engine.processes.signal_handlers import SignalHandler, signal_handlers
from midstride.engine.session.crash import crash_file, crashes_in, note_crashes
from midstride.engine.session.outcome import Outcome, decide
from midstride.engine.session.private_file import AnonymousFile
from midstride.engine.session.requests import say_interrupted
from midstride.engine.storage.draft import draft_of
from midstride.engine.strategies.torch_collective import leave_process_group, leave_process_group_of_one
from midstride.engine.world import World

__all__ = ["RankResult", "TrainerCall", "find_unpicklable", "run_in_children"]

#: seconds that the other ranks have, after one failed, to write the errors that they raised
_OTHERS_S = 10.0


@dataclass
class TrainerCall:
    """One call of a Trainer's method, to be sent to the ranks.

    Args:
        trainer: class of the Trainer.
        settings: arguments of its constructor.
        verb: "fit", "validate", "test" or "predict".
        module: first argument of the method.
        data: second argument of the method.
        arguments: its other arguments by name.
    """

    trainer: type[Any]
    settings: Mapping[str, Any]
    verb: str
    module: Any
    data: Any
    arguments: Mapping[str, Any]

    @property
    def takes_snapshots(self) -> bool:
        """Whether the call is a fit that can be resumed."""
        return self.arguments.get("run") is not None and self.settings.get("snapshots") is not None

    def make(self) -> "RankResult":
        """Make the call in this process, with a new Trainer."""
        trainer = self.trainer(**self.settings)
        built = ModuleStructure(self.module, torch.device("cpu"))
        value = getattr(trainer, self.verb)(self.module, self.data, **self.arguments)
        return RankResult(value, trainer.export_result(built))

    def check_picklable(self) -> None:
        """Check that the call can be pickled for a new process.

        Raises:
            UserError: it cannot; all parts that cannot are named by their paths.
        """
        named = {"module": self.module, "data": self.data, **{f"Trainer({n}=...)": v for n, v in self.settings.items()}}
        faults = [fault for path, value in named.items() if (fault := find_unpicklable(value, path))]
        if faults:
            raise UserError(
                "\n  ".join(
                    ["ddp_spawn pickles these for new processes, which failed (ddp_fork needs no pickling):", *faults]
                )
            )


class RemoteTraceback(Exception):
    """Traceback of an error of another process, as text, set as its `__cause__`."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass
class RankResult:
    """The result of one rank, for the process that started it.

    Args:
        value: return value of the call.
        state: the result of `export_result` of the rank's Trainer.
    """

    value: Any
    state: Mapping[str, Any]


def run_in_children(call: TrainerCall, ranks: int, method: Literal["spawn", "fork"]) -> list[RankResult]:
    """Make `call` in `ranks` child processes, and return their results by rank.

    No child outlives this function, whether it returns or raises.

    Raises:
        UserError: the call cannot be pickled for fresh processes; nothing was started.
        WorldError: a rank was killed.
        Exception: the error of a rank, with its traceback as the cause.
    """
    if method == "spawn":
        call.check_picklable()
    leave_process_group_of_one()  # of a fit before, in this process
    with tempfile.TemporaryDirectory(prefix="midstride-") as name:
        folder = Path(name)
        if method == "spawn":
            # Into a file: each rank gets a copy of its own. Handed over by torch, they would share their weights.
            torch.save(call, folder / "call.pt")
        meeting = AnonymousFile()
        base = {**os.environ, **(hash_seed() if method == "spawn" else {}), World.STARTED: ""}
        environments = rank_environments(ranks, meeting.path, base=base)
        with ChildProcesses(_run_rank, [folder, call if method == "fork" else None], environments, method) as children:
            asked_to_stop = _watch(children, call.takes_snapshots)
            codes = children.exit_codes()
        if method == "spawn" and codes == [1] * ranks and not any(folder.glob("raised-*.pt")):
            raise UserError(
                "the new processes failed before they were ranks; their error is printed above. They import this "
                'script: start training below `if __name__ == "__main__":`'
            )
        _raise_for_results(folder, codes, asked_to_stop)
        return [_read(folder / f"result-{rank}.pt") for rank in range(ranks)]


def _watch(children: ChildProcesses, takes_snapshots: bool) -> bool:
    """Wait until all children ended, or seconds after a failure; return whether to stop."""
    deadline = float("inf")
    with _stop_signals_forwarded(children, takes_snapshots) as stops:
        while children.running() and time.monotonic() <= deadline:
            children.wait(0.2)
            if deadline == float("inf") and any(children.exit_codes()):
                deadline = time.monotonic() + _OTHERS_S
        return bool(stops)


@contextmanager
def _stop_signals_forwarded(children: ChildProcesses, takes_snapshots: bool) -> Iterator[list[int]]:
    """Forward SIGTERM to the ranks, which take a snapshot and end; yield received signals.

    If they take snapshots, the first Ctrl-C does the same. The next one ends them.
    """
    stops: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        stops.append(number)
        children.send(signal.SIGTERM)

    def interrupt(number: int, frame: Any) -> None:
        if stops:
            raise KeyboardInterrupt
        say_interrupted()
        pass_on(number, frame)

    handlers: dict[int, SignalHandler] = {signal.SIGTERM: pass_on}
    if takes_snapshots and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        handlers[signal.SIGINT] = interrupt
    with signal_handlers(handlers):
        yield stops


def _run_rank(folder: Path, call: TrainerCall | None) -> None:
    """Run one rank: make the call, and write its result or its error to `folder`."""
    torch.set_num_threads(1 if call is not None else torch.get_num_threads())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent, which ends the ranks
    rank = World.from_environment().rank
    note_crashes(crash_file(folder, rank))
    try:
        made: TrainerCall = call or _read(folder / "call.pt")
        _write(folder / f"result-{rank}.pt", made.make())
        leave_process_group()
    except BaseException as error:
        _write(folder / f"raised-{rank}.pt", (Outcome.of(error, rank=rank), *_portable(error)))
        sys.exit(1)


def _write(path: Path, value: Any) -> None:
    with draft_of(path) as draft:
        torch.save(value, draft)


def _read(path: Path) -> Any:
    """Return the object that another process has written, with tensors on the host.

    A rank must use CUDA on its own GPU only, and a process that uses CUDA cannot fork ranks again.
    """
    return torch.load(path, map_location="cpu", weights_only=False)


def _portable(error: BaseException) -> tuple[BaseException, str]:
    """Return the error and its traceback as text.

    An error that cannot be pickled is replaced by a WorldError.
    """
    text = "".join(traceback.format_exception(error))
    try:
        return pickle.loads(pickle.dumps(error)), text
    except Exception:
        return WorldError(text), text


def _raise_for_results(folder: Path, codes: Sequence[int | None], asked_to_stop: bool) -> None:
    ranks = len(codes)
    raised = [_read(path) for path in sorted(folder.glob("raised-*.pt"))]
    done = [Outcome("done", rank=rank) for rank in range(ranks) if (folder / f"result-{rank}.pt").exists()]
    told = [*done, *(outcome for outcome, _, _ in raised)]
    crashed = [crash for crash in crashes_in(folder) if crash.rank not in {outcome.rank for outcome in told}]
    outcome = decide([*told, *crashed], None if asked_to_stop else 1, ranks)
    if outcome.kind == "done":
        return
    for said, error, text in raised:
        if said == outcome:
            raise error from (None if isinstance(error, EngineError) else RemoteTraceback(text))
    if asked_to_stop and -signal.SIGTERM in codes:
        raise StopRequested("asked to stop while ranks were starting or ending; the same command starts them again")
    if asked_to_stop:
        raise StopRequested(f"asked to stop; then {outcome.error}")
    raise WorldError(outcome.error)


def find_unpicklable(value: Any, path: str) -> str | None:
    """Return path and error of the innermost part of `value` that cannot be pickled, if any.

    >>> find_unpicklable({"rate": 0.1, "fn": lambda x: x}, "module.options").partition(":")[0]
    "module.options['fn']"
    """
    return _innermost(value, path, set())


def _innermost(value: Any, path: str, seen: set[int]) -> str | None:
    if id(value) in seen:
        return None
    seen.add(id(value))
    try:
        pickle.dumps(value)
    except Exception as error:
        inner = (_innermost(item, f"{path}{key}", seen) for key, item in _members(value))
        return next(filter(None, inner), f"{path}: {error}")
    return None


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield attributes or items of `value` with the code to reach each; submodules as `.name`."""
    if isinstance(value, nn.Module):
        yield from ((f".{name}", child) for name, child in children_of(value).items())
    if not isinstance(value, type):
        yield from (member for member in members_of(value) if member[0] != "._modules")
