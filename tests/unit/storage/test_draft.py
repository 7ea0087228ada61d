"""What stands at a path is whole, or the one before."""

from pathlib import Path

import pytest

from midstride.engine.storage.draft import draft_of


def test_a_file_is_replaced_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("before")
    with draft_of(path) as draft:
        draft.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def fill_disk(path: Path) -> None:
    with draft_of(path) as draft:
        draft.write_text("aft")
        raise OSError("no space")


def test_of_a_file_that_could_not_be_written_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("before")
    with pytest.raises(OSError, match="no space"):
        fill_disk(path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
