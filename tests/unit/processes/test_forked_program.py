"""Files that a fork has left open keep what was written; what its parent holds back is written once."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import pytest

from midstride.engine.processes.child_processes import ChildProcesses
from midstride.engine.processes.forked_program import ForkedProgram

left_open: list[IO[Any]] = []


class InCycle:
    """An object that only the garbage collector frees."""

    def __init__(self, file: IO[Any]) -> None:
        self.file, self.own = file, self


def writes(folder: Path) -> None:
    left_open.append((folder / "text").open("w"))
    left_open[-1].write("one line\n")
    InCycle((folder / "bytes").open("wb")).file.write(b"seven\n")
    left_open.append((folder / "closed").open("w"))
    os.close(left_open[-1].fileno())


def as_program(main: Callable[[], object], environment: Mapping[str, str]) -> int:
    return ForkedProgram(main, environment).wait()


def as_child(main: Callable[[], object], environment: Mapping[str, str]) -> int | None:
    with ChildProcesses(main, [], [environment]) as children:
        while children.running():
            children.wait(1.0)
        return children.exit_codes()[0]


@pytest.mark.parametrize("start", [as_program, as_child])
def test_open_files_of_a_fork_are_written(start: Callable[..., int | None], tmp_path: Path) -> None:
    with (tmp_path / "of the parent").open("w") as held:
        held.write("once")
        assert start(lambda: writes(tmp_path), dict(os.environ)) == 0
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {"text": "one line\n", "bytes": "seven\n", "closed": "", "of the parent": "once"}
