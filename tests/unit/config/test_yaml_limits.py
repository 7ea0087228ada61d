"""Job files that are no files, or whose aliases multiply, are refused with one line, at once."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import JobError

pytestmark = pytest.mark.fast

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)

#: what is made in place of a job file -> words of the error
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "aliases that multiply": (lambda path: path.write_text(LAUGHS), "has more than 100000 values"),
    "many levels": (lambda path: path.write_text("a: " + "[" * 150 + "]" * 150), "100 levels"),
    "a FIFO": (os.mkfifo, "it is no regular file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "it is no regular file"),
    "a folder": (Path.mkdir, "cannot be read"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_job_file_is_refused(name: str, tmp_path: Path) -> None:
    make, words = WRONG[name]
    make(tmp_path / "job.yaml")
    with pytest.raises(JobError, match=words):
        TrainingJob.load(tmp_path / "job.yaml")


@pytest.mark.parametrize("option", ["tracking_uri", "nested.0"])
def test_a_logger_with_a_password_in_its_url_is_refused(option: str, tmp_path: Path) -> None:
    url = "https://me:hunter2@mlflow.example.org"
    args = f"{{tracking_uri: '{url}'}}" if option == "tracking_uri" else f"{{nested: ['{url}']}}"
    (tmp_path / "job.yaml").write_text(
        "name: a\nmodule: m:M\ndata: m:D\ntrainer: {max_steps: 1}\nloggers: [{path: mlflow, args: " + args + "}]\n"
    )
    with pytest.raises(JobError, match="holds a password") as error:
        TrainingJob.load(tmp_path / "job.yaml")
    assert "hunter2" not in str(error.value)
