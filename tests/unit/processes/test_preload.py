"""Imports with the garbage collector paused, and out of its sight."""

import gc
import subprocess
import sys

import pytest

from midstride.engine.processes.preload import collector_paused, preload

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_off_within_and_as_it_was_afterwards(was_on: bool) -> None:
    try:
        gc.enable() if was_on else gc.disable()
        with collector_paused():
            assert not gc.isenabled()
        assert gc.isenabled() is was_on
    finally:
        gc.enable()


def test_what_is_preloaded_is_out_of_the_collectors_sight() -> None:
    program = (
        "import gc, sys; from midstride.engine.processes.preload import preload; preload('colorsys');"
        "assert 'colorsys' in sys.modules; assert gc.get_freeze_count() > 1000; assert gc.isenabled()"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_module_that_is_missing_stops_a_preload() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_module_of_that_name"):
        preload("no_module_of_that_name")
    assert gc.isenabled()
