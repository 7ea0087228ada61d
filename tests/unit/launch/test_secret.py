"""The secret of a run: kept where its user alone reads it, and refused where others could."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.flow_runs import tiny_job

from midstride.engine.errors import JobError
from midstride.engine.launch.machines.secret import VARIABLE, RunSecret, read_secret
from midstride.engine.runs.run import Run

pytestmark = pytest.mark.fast


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run whose secrets are in a folder of the test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        yield Run(tiny_job(tmp_path), "a")


def test_a_secret_is_kept_until_the_run_is_done(run: Run) -> None:
    before = os.umask(0)
    try:
        made = RunSecret.of(run)
    finally:
        os.umask(before)
    assert made.file is not None
    assert (made.file.stat().st_mode & 0o777, made.file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert len(bytes.fromhex(made.text)) == 32
    assert RunSecret.of(run) == made
    assert made.option == f" --secret-file {made.file}"
    assert read_secret(made.file) == made.text
    assert RunSecret.of(Run(run.job, "b")).text != made.text
    made.forget()
    assert RunSecret.of(run).text != made.text


def test_a_secret_of_the_environment_is_not_passed_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "s" * 40)
    given = RunSecret.of(run)
    assert (given.text, given.file, given.option) == ("s" * 40, None, "")
    assert VARIABLE not in os.environ
    assert not Path(os.environ["XDG_STATE_HOME"]).exists()


def with_mode(mode: int) -> Callable[[Path], object]:
    return lambda path: (path.write_text("s" * 64), path.chmod(mode))


#: the file -> words of the error
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "No such file"),
    "readable by the group": (with_mode(0o640), "others can read it: chmod 600"),
    "writable by others": (with_mode(0o602), "others can read it: chmod 600"),
    "a FIFO": (os.mkfifo, "no regular file of this user"),
    "a folder": (Path.mkdir, "no regular file of this user"),
    "a link": (lambda path: path.symlink_to("/etc/passwd"), "no file of this user"),
    "empty": (lambda path: path.touch(0o600), "at least 32 characters"),
    "too short": (lambda path: (path.touch(0o600), path.write_text("hunter2")), "at least 32 characters"),
    "no text": (lambda path: (path.touch(0o600), path.write_bytes(b"\xff" * 64)), "is no text"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_with_one_line(name: str, tmp_path: Path) -> None:
    make, words = WRONG[name]
    make(tmp_path / "secret")
    with pytest.raises(JobError, match=words) as error:
        read_secret(tmp_path / "secret")
    assert "hunter2" not in str(error.value)


def test_without_a_secret_the_way_to_one_is_told() -> None:
    with pytest.raises(JobError, match=f"pass --secret-file FILE, as the launcher prints it, or set {VARIABLE}"):
        read_secret(None)
