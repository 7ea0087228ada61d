"""What is swept: folders that were never committed, and none that could not be looked at."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.snapshot_writers import OPEN, alone, take

from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.snapshots.lease import acquire
from midstride.engine.storage.store import Store


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while OPEN:
        assert OPEN.pop().close(10.0)


def test_a_snapshot_whose_folder_cannot_be_listed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(tmp_path)
    first, second = take(alone(store), 1, 2)
    (tmp_path / "snapshots" / "000000000001-g000000").mkdir()
    failed = []
    scandir = os.scandir

    def failing(path: Any) -> Any:
        if str(path).endswith(first.name):
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)
    SnapshotCatalog(store).sweep(second)
    monkeypatch.undo()

    assert failed
    assert [snapshot.name for snapshot in SnapshotCatalog(store).snapshots()] == [first.name, second.name]
    assert SnapshotCatalog(store).rows() == ["1,row\n", "2,row\n"]
    assert len(list((tmp_path / "snapshots").iterdir())) == 2


def test_a_file_in_the_place_of_a_snapshot_is_swept(tmp_path: Path) -> None:
    """Else no old snapshot would be removed any more, and the disk fill."""
    store = Store.open(tmp_path)
    first, second = take(alone(store), 1, 2)
    (tmp_path / "snapshots" / "000000000001-g000000").touch()
    SnapshotCatalog(store).sweep(second)
    assert store.list("snapshots") == [first.name, second.name]


def test_a_folder_in_the_place_of_a_draft_is_swept(tmp_path: Path) -> None:
    (tmp_path / "metrics" / ".rows.csv.0.draft" / "inside").mkdir(parents=True)
    Store.open(tmp_path).remove_drafts("metrics")
    assert list((tmp_path / "metrics").iterdir()) == []


def test_a_new_world_sweeps_unfinished_files_of_an_older_one(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    acquire(store, None, {})
    drafts = [
        tmp_path / folder / f".{file}.0.draft"
        for folder, file in [
            ("", "run.json"),
            ("", "metrics.csv"),
            ("metrics", "000000000001-g000001.csv"),
            ("lease", "000001.json"),
        ]
    ]
    of_the_next = tmp_path / "lease" / ".000003.json.0.draft"
    for draft in [*drafts, of_the_next]:
        draft.parent.mkdir(exist_ok=True)
        draft.write_text("half")

    acquire(store, None, {})

    assert [draft for draft in drafts if draft.exists()] == []
    assert of_the_next.exists()  # whose writer may be about to take over
