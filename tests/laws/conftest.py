"""Undisturbed runs to compare with, one for each setting, and the process that ranks are forked from."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from laws.lives import Setting, live

from midstride.engine.testing import PRELOAD, run_ranks


def _nothing() -> None:
    pass


@pytest.fixture(scope="session", autouse=True)
def _warm() -> Iterator[None]:
    """Start the process that ranks are forked from before any test counts processes."""
    torch.set_num_threads(1)
    run_ranks(_nothing, preload=(*PRELOAD, "torchmetrics"))
    return


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
