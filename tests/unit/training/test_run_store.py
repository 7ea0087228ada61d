"""The folder of a run as a fit finds it: what is in the place of something else, and whose fault an error is."""

from pathlib import Path

import pytest
from support.refused import fit

from midstride.engine.errors import StoreUnsafe
from midstride.engine.snapshots.catalog import RUN_FOLDERS


@pytest.mark.parametrize("folder", RUN_FOLDERS)
def test_a_run_with_a_file_in_the_place_of_a_folder_is_refused_and_nothing_is_lost(folder: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fit(run)
    (run / folder).mkdir(exist_ok=True)
    (run / folder).rename(tmp_path / "kept")
    (run / folder).touch()
    before = sorted(run.rglob("*"))
    with pytest.raises(StoreUnsafe, match=f"run/{folder} is a file, and has to be a folder: move it away"):
        fit(run)
    assert sorted(run.rglob("*")) == before
    (run / folder).unlink()
    (tmp_path / "kept").rename(run / folder)
    fit(run)
