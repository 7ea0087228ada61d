"""Whatever is done to a file of a run, it ends with the bits of the run that nothing befell, or says what it lacks.

`make soak-damage` does it to more of them.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from soak.damage import assert_survives, told

CASES, ALL_CASES = 30, 510


@pytest.fixture(scope="session")
def told_at(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a run with a story."""
    done: dict[str, Path] = {}

    def folder(story: str) -> Path:
        if story not in done:
            done[story] = told(story, tmp_path_factory.mktemp("told"))
        return done[story]

    return folder


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        cases = ALL_CASES if metafunc.config.getoption("laws") == "all" else CASES
        metafunc.parametrize("seed", range(cases))


def test_a_damaged_file_is_named_or_does_no_harm(
    seed: int, told_at: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert_survives(seed, tmp_path, told_at, lambda: caplog.text)
