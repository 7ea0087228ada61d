"""Snapshots: committed or never happened, and which of them count."""

import pytest
from support.snapshot_files import FILES, file_of
from support.snapshot_writers import alone, state_at, take

from midstride.engine.errors import SnapshotError
from midstride.engine.snapshots.catalog import Position, SnapshotCatalog, snapshot_name
from midstride.engine.snapshots.reader import read
from midstride.engine.state.differences import differences
from midstride.engine.storage.store import Store


def test_a_snapshot_comes_back(store: Store):
    (snapshot,) = take(alone(store), 20)
    assert snapshot.name == "000000000020-g000001"
    assert SnapshotCatalog(store).snapshots() == [snapshot]
    assert SnapshotCatalog(store).newest_good() == snapshot
    back = read(store, snapshot, 0)
    assert differences(state_at(20), back) == []
    assert back["module"]["weight"].data_ptr() == back["module"]["tied"].data_ptr()
    manifest = snapshot.manifest
    assert sorted(manifest["files"]) == sorted(FILES)
    assert manifest["facts"] == {"threads": 1}
    assert (manifest["run"], manifest["world_size"], manifest["generation"]) == ("digits", 1, 1)
    assert snapshot.bytes == sum(file_of(store, snapshot, name).stat().st_size for name in FILES)


def test_taken_again_at_the_same_place_it_is_the_same_snapshot(store: Store):
    writer = alone(store)
    first, again = take(writer, 5, 5)
    assert first is again
    between = writer.take(Position(5, 2), state_at(5), "", {}).future.result()
    assert between.name == "000000000005.0002-g000001"
    assert [snapshot.position for snapshot in SnapshotCatalog(store).snapshots()] == [Position(5), Position(5, 2)]
    writer.flush()
    writer.close()


def test_names_sort_as_places_do():
    positions = [Position(9), Position(10), Position(10, 1), Position(10, 17), Position(11), Position(123456)]
    names = [snapshot_name(position, 3) for position in positions]
    assert sorted(names) == names
    assert sorted(positions) == positions


@pytest.mark.parametrize("phase", ["snapshot_write", "before_commit"])
def test_without_a_manifest_it_never_happened(store: Store, phase: str):
    writer = alone(store)
    (first,) = take(writer, 1)

    def die(now: str) -> None:
        if now == phase:
            raise RuntimeError("a fault")

    with pytest.raises(SnapshotError, match="000000000002-g000001 was not taken, rank 0 says: RuntimeError: a fault"):
        take(writer, 2, probe=die)
    assert "manifest.json" not in store.list("snapshots/000000000002-g000001")
    assert SnapshotCatalog(store).newest_good() == first
    assert SnapshotCatalog(store).set_aside_reasons() == {}
    assert SnapshotCatalog(store).rows() == ["1,row\n"]
    with pytest.raises(SnapshotError, match="a fault"):
        writer.check()  # what went wrong is told until the run ends
    take(alone(store, first.name), 3)
    assert store.list("snapshots") == ["000000000001-g000001", "000000000003-g000002"]
    assert SnapshotCatalog(store).rows() == ["1,row\n", "3,row\n"]
