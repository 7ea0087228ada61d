"""Files that a fork has left open keep what was written; what its parent holds back is written once."""

import gzip
import os
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import pytest

from midstride.engine.processes.child_processes import ChildProcesses
from midstride.engine.processes.forked_program import ForkedProgram

left_open: list[IO[Any]] = []
left_archives: list[zipfile.ZipFile] = []


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
    left_open.append(gzip.open(folder / "text.gz", "wt"))  # noqa: SIM115
    left_open[-1].write("packed\n")
    left_archives.append(zipfile.ZipFile(folder / "texts.zip", "w"))
    left_archives[-1].writestr("text", "zipped")


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
    with gzip.open(tmp_path / "text.gz", "rt") as packed, zipfile.ZipFile(tmp_path / "texts.zip") as zipped:
        assert (packed.read(), zipped.read("text")) == ("packed\n", b"zipped")
    written = {path.name: path.read_text() for path in tmp_path.iterdir() if not path.suffix}
    assert written == {"text": "one line\n", "bytes": "seven\n", "closed": "", "of the parent": "once"}


def ends_without_output(folder: Path, code: object) -> None:
    left_open.append((folder / "text").open("w"))
    left_open[-1].write("one line\n")
    sys.stdout.close()
    sys.stderr = (folder / "errors").open("w")
    sys.exit(code)  # type: ignore[arg-type]


@pytest.mark.parametrize("start", [as_program, as_child])
@pytest.mark.parametrize(
    ("code", "found", "printed"), [(None, 0, ""), (3, 3, ""), (2**40 + 5, 5, ""), ("a message", 1, "a message\n")]
)
def test_a_fork_ends_as_python_does(
    start: Callable[..., int | None], code: object, found: int, printed: str, tmp_path: Path
) -> None:
    assert start(lambda: ends_without_output(tmp_path, code), dict(os.environ)) == found
    assert (tmp_path / "text").read_text() == "one line\n"
    assert (tmp_path / "errors").read_text() == printed
