"""Undisturbed runs to compare with, one for each setting."""

import fcntl
import hashlib
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from laws.lives import LAYOUTS, Setting, live

from midstride.engine.session.replay_plan import NEVER


def _undisturbed(setting: Setting) -> Setting:
    """Return a setting that must end with the same bits, and takes fewer snapshots."""
    options = {**LAYOUTS[setting.layout], **setting.options, "snapshots": {"every_steps": NEVER}}
    return replace(setting, layout="plain", options=options)


@pytest.fixture(scope="session")
def undisturbed(shared_folder: Path) -> Callable[[Setting], Path]:
    """Return the folder of a run of a setting that nothing befell: no death, and no snapshot inside an epoch.

    What one worker has trained the others read.
    """

    def folder(setting: Setting) -> Path:
        setting = _undisturbed(setting)
        name = hashlib.sha256(pickle.dumps(setting)).hexdigest()[:16]
        home, done = shared_folder / f"undisturbed-{name}", shared_folder / f"undisturbed-{name}-done"
        with (shared_folder / f"undisturbed-{name}-lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                home.mkdir()
                assert live(setting, home) == [0] * setting.ranks
                done.touch()
        return home

    return folder
