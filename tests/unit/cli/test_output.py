"""What commands print for programs can be read by all of them."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from midstride.engine.cli.output import print_json


def test_json_has_no_number_that_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"best": ("val/loss", math.nan), "at": [math.inf, 0.1, 1e-12, 10**20]})

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    printed = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert printed == {"best": ["val/loss", None], "at": [None, 0.1, 1e-12, 10**20]}


COMMAND = (sys.executable, "-m", "midstride.engine")


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("init", "project")])
def test_a_full_disk_under_the_output_gives_no_traceback(arguments: tuple[str, ...], tmp_path: Path) -> None:
    command = [*COMMAND, *arguments]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    said = "standard output takes no more (No space left on device): further output is dropped\n"
    assert (ended.returncode, ended.stderr) == (1, said)


def test_a_folder_that_was_removed_is_told_without_a_traceback(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    command = ["sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh", *COMMAND, "runs", "runs"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    said = "the current folder has been removed: change to an existing one\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", said)
