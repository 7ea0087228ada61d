"""Undisturbed runs to compare with, one for each setting."""

from collections.abc import Callable
from pathlib import Path

import pytest
from laws.lives import Setting, live


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Setting], Path]:
    """Return the folder of a run of a setting that nothing befell."""
    done: dict[str, Path] = {}

    def folder(setting: Setting) -> Path:
        key = repr(setting)
        if key not in done:
            done[key] = tmp_path_factory.mktemp("undisturbed")
            assert live(setting, done[key]) == [0] * setting.ranks
        return done[key]

    return folder
