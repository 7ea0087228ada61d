"""A launcher of the user's own that cannot start a world is named before anything is started."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from midstride.engine.config.job import TrainingJob
from midstride.engine.errors import EngineError, JobError, UserCodeError
from midstride.engine.launch.launchers.build import own_launcher_faults, world_command
from midstride.engine.launch.launchers.spawn import Spawn
from midstride.engine.session.session import Session

OWN = """
from midstride.engine import Launcher
from midstride.engine.launch.launchers.spawn import Spawn


class Good(Spawn):
    pass


class Unwritten(Launcher):
    pass


class Other(Spawn):
    def command(self, session):
        return []


class Hosted(Spawn):
    def __init__(self, host):
        self.host = host


class Fails(Spawn):
    def __init__(self):
        raise LookupError("no hosts")
"""


def job_with(launcher: str, folder: Path) -> TrainingJob:
    document = {"name": "a", "module": "m:A", "data": "m:B", "world": {"launcher": launcher}, "folder": str(folder)}
    return TrainingJob.model_validate({**document, "trainer": {"max_epochs": 1}})


@pytest.mark.parametrize(
    ("name", "start", "end"),
    [
        ("spawn", "", ""),
        ("own_launchers:Good", "", ""),
        ("own_launchers:Unwritten", "world.launcher: Unwritten has no command: write command(self, session, job,", ""),
        ("own_launchers:Other", "world.launcher: Other.command(self, session) is called as command(self, session,", ""),
        ("own_launchers:Hosted", "world.launcher.host: is missing; own_launchers:Hosted needs it", ""),
        ("own_launchers:Fails", "Traceback", "LookupError: no hosts\nraised in building own_launchers:Fails"),
        ("own_launchers:Nowhere", "world.launcher: ", "it has Fails, Good, Hosted, Other, Unwritten"),
    ],
)
def test_a_launcher_that_cannot_be_built_is_a_fault_of_the_job(name: str, start: str, end: str, tmp_path: Path) -> None:
    (tmp_path / "own_launchers.py").write_text(OWN)
    said = own_launcher_faults(job_with(name, tmp_path))
    assert len(said) == bool(start)
    assert all(line.startswith(start) and line.endswith(end) for line in said)


def _raise(*_: Any) -> Any:
    raise LookupError("no hosts")


@pytest.mark.parametrize(
    ("method", "gives", "kind", "words"),
    [
        ("command", lambda *_: None, JobError, r"Own.command returned None; a list of texts is needed"),
        ("command", lambda *_: "nice true", JobError, r"Own.command returned 'nice true'; a list"),
        ("command", lambda *_: ["nice", 5], JobError, r"Own.command returned \['nice', 5\]; a list"),
        ("command", lambda *_: [], JobError, r"Own.command returned \[\]; a list"),
        ("command", _raise, UserCodeError, r"LookupError: no hosts\s+raised in launcher Own"),
        ("environment", lambda *_: None, JobError, r"Own.environment returned None; a dict of texts is needed"),
        ("environment", lambda *_: {"A": 3, "B": "b"}, JobError, r"Own.environment has {'A': 3}; names and values are"),
        ("environment", _raise, UserCodeError, r"LookupError: no hosts\s+raised in launcher Own"),
    ],
)
def test_what_starts_no_world_is_named(
    method: str, gives: Callable[..., Any], kind: type[EngineError], words: str, tmp_path: Path
) -> None:
    launcher = type("Own", (Spawn,), {"__module__": "model", method: lambda self, *given, **named: gives()})()
    with pytest.raises(kind, match=words):
        world_command(launcher, Session(tmp_path), job_with("spawn", tmp_path), 1.0)


def test_a_launcher_gives_its_command_and_its_environment(tmp_path: Path) -> None:
    command, environment = world_command(Spawn(), Session(tmp_path), job_with("spawn", tmp_path), 1.0)
    assert command[-3:] == [str(tmp_path), "1", "1.0"]
    assert environment[Session.VARIABLE] == str(tmp_path)
    assert Session.VARIABLE not in os.environ
