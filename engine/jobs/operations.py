"""Operations on a run that need torch or user code, each in a separate process.

An orchestrator must neither load torch nor live with what a user's code leaves behind: threads, devices,
memory, a crash. `python -m midstride.engine.jobs.operations SESSION OPERATION` does the work and leaves the result in
the session.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from midstride.engine.config.import_paths import make_importable
from midstride.engine.processes.environment import cores, program_environment
from midstride.engine.processes.lifetime import tie_to_parent
from midstride.engine.processes.preload import preload
from midstride.engine.processes.supervised_process import SupervisedProcess
from midstride.engine.runs.run import Run
from midstride.engine.session.crash import crash_file, note_crashes
from midstride.engine.session.outcome import Outcome, decide, raise_for_outcome
from midstride.engine.session.session import Session

__all__ = ["OPERATIONS", "main", "run_operation"]

_GRACE_S = 5.0
_POLL_S = 0.1


#: name -> the function that does it, imported in its own process: it takes the run and arguments, and returns JSON
OPERATIONS: dict[str, str] = {
    "build": "midstride.engine.jobs.build:try_build",
    "prepare": "midstride.engine.jobs.prepare:prepare",
    "evaluate": "midstride.engine.jobs.evaluate:evaluate",
    "predict": "midstride.engine.jobs.predict:predict",
    "export": "midstride.engine.jobs.export_weights:export_weights",
    "compare": "midstride.engine.jobs.evaluate:evaluate_with_champion",
    "publish": "midstride.engine.jobs.publish:publish",
}


def _nothing() -> None:
    """Do nothing."""


def run_operation(
    operation: str,
    run: Run,
    *,
    on_line: Callable[[str], object],
    stop_if_asked: Callable[[], object] = _nothing,
    without: Collection[str] = (),
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Run `operation` in a separate process and return its result.

    Any exception can interrupt it, and it leaves no process behind.

    Args:
        operation: one of `OPERATIONS`.
        run: the run.
        on_line: gets the lines that the process prints.
        stop_if_asked: called ten times a second; an exception that it raises ends the process.
        without: environment variables of ours that the process does not get.
        arguments: further arguments of the operation, as JSON values.

    Raises:
        UserError: the job or the user's code is wrong; the message starts with their traceback.
        WorldError: the process died.
    """
    ours = {name: value for name, value in os.environ.items() if name not in without}
    with Session.held({**run.document(0, time.time()), "arguments": dict(arguments)}) as session:
        command = [sys.executable, "-m", "midstride.engine.jobs.operations", str(session.folder), operation]
        environment = {**program_environment(ours, cores()), Session.VARIABLE: str(session.folder)}
        try:
            with SupervisedProcess(command, environment=environment, log=session.log, grace_s=_GRACE_S) as group:
                while (code := group.wait(_POLL_S)) is None:
                    stop_if_asked()
                    _pass_on(group, on_line)
            _pass_on(group, on_line)
            raise_for_outcome(decide(session.outcomes(), code, 1))
            return json.loads(_result(session).read_text(encoding="utf-8"))
        finally:
            session.remove()


def _pass_on(group: SupervisedProcess, on_line: Callable[[str], object]) -> None:
    if lines := group.lines():
        on_line("\n".join(lines))


def _result(session: Session) -> Path:
    return session.folder / "result.json"


def main() -> None:
    """Run the operation that the command line names."""
    tie_to_parent()
    with contextlib.suppress(ValueError):  # what `python -m` put there is not importable elsewhere
        sys.path.remove(str(Path.cwd()))
    session, operation = Session(sys.argv[1]), sys.argv[2]
    try:
        note_crashes(crash_file(session.folder, 0))
        document = session.document()
        run = Run.from_document(document)
        make_importable(run.job.folder)
        module, _, name = OPERATIONS[operation].partition(":")
        preload(module)
        result = getattr(import_module(module), name)(run, **document["arguments"])
        _result(session).write_text(json.dumps(result), encoding="utf-8")
        outcome = Outcome("done")
    except BaseException as error:
        outcome = Outcome.of(error)
    session.write_outcome(outcome)
    sys.exit(outcome.code)


if __name__ == "__main__":
    main()
