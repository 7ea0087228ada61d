"""Law 2: a damaged snapshot is found before it is used, and an older one is taken."""

import contextlib
import errno
import io
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.snapshot_files import FILES, file_of, flip
from support.snapshot_writers import alone, take

from midstride.engine.errors import SnapshotDamaged, SnapshotError, SnapshotMissing
from midstride.engine.snapshots.catalog import FORMAT, SnapshotCatalog
from midstride.engine.snapshots.reader import read
from midstride.engine.storage.checksums import encode_document
from midstride.engine.storage.store import Store


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def _truncate(path: Path, at: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * at)])


def _make_folder_of(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _make_full_folder_of(path: Path) -> None:
    _make_folder_of(path)
    (path / "file").touch()


def _link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


DAMAGES: dict[str, Callable[[Path], None]] = {
    **{f"flipped at {at}": lambda path, at=at: flip(path, at) for at in (0.0, 0.1, 0.5, 0.9, 1.0)},  # type: ignore[misc]
    **{f"truncated at {at}": lambda path, at=at: _truncate(path, at) for at in (0.0, 0.3, 0.7, 0.99)},  # type: ignore[misc]
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0") and None,
    "a folder in its place": _make_folder_of,
    "a full folder in its place": _make_full_folder_of,
    "a loop of links": _link_to_itself,
}
#: what keeps a snapshot from being read -> what is said of it
UNREADABLE = {
    "a folder in its place": "cannot be read: Is a directory",
    "a full folder in its place": "cannot be read: Is a directory",
    "a loop of links": "cannot be read: Too many levels of symbolic links",
}


@pytest.mark.parametrize("damage", list(DAMAGES))
@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_damage_is_found_and_the_newest_good_one_is_taken(
    store: Store, name: str, damage: str, caplog: pytest.LogCaptureFixture
):
    good, bad = take(alone(store), 1, 2)
    DAMAGES[damage](file_of(store, bad, name))
    assert SnapshotCatalog(store).newest_good() == good
    ((aside, reason),) = SnapshotCatalog(store).set_aside_reasons().items()
    assert aside == bad.name
    assert UNREADABLE.get(damage, name) in reason
    assert f"snapshot {bad.name} is set aside, an older one is taken" in caplog.text
    assert SnapshotCatalog(store).snapshots() == [good]
    assert name in names_in(file_of(store, bad, ""))
    caplog.clear()
    assert SnapshotCatalog(store).newest_good() == good
    assert caplog.text == ""


def _nest_deep(path: Path) -> None:
    path.write_bytes(b"[" * 1_000_000)


@contextlib.contextmanager
def _unreadable(folder: Path) -> Iterator[None]:
    """Nothing below `folder` can be read, by root either."""
    real: Any = io.open
    with pytest.MonkeyPatch.context() as patch:

        def refuse(file: Any, *arguments: Any, **options: Any) -> Any:
            if str(file).startswith(f"{folder}/") and "manifest" not in str(file):
                raise OSError(errno.EIO, "Input/output error", str(file))
            return real(file, *arguments, **options)

        patch.setattr(io, "open", refuse)
        yield


def test_a_deep_manifest_and_a_file_for_a_folder_are_damage(store: Store, caplog: pytest.LogCaptureFixture):
    good, second, third = take(alone(store), 1, 2, 3)
    _nest_deep(file_of(store, second, "manifest.json"))
    shutil.rmtree(file_of(store, third, ""))
    file_of(store, third, "").touch()
    assert SnapshotCatalog(store).newest_good() == good
    assert "is no JSON document with a checksum: maximum recursion depth" in caplog.text
    assert f"{third.name} cannot be read: it is a file, not a folder" in caplog.text


def test_a_disk_that_cannot_be_read_is_no_damage(store: Store):
    """Nothing is set aside before something else could be read: else a bad mount would start the run over."""
    good, bad = take(alone(store), 1, 2)
    with (
        _unreadable(file_of(store, bad, "").parent),
        pytest.raises(SnapshotDamaged, match="cannot be read: Input/output error"),
    ):
        SnapshotCatalog(store).newest_good()
    assert SnapshotCatalog(store).set_aside_reasons() == {}
    with _unreadable(file_of(store, bad, "")):
        assert SnapshotCatalog(store).newest_good() == good
    assert list(SnapshotCatalog(store).set_aside_reasons()) == [bad.name]


@pytest.mark.parametrize("name", ["metrics.csv", "manifest.json"])
def test_damage_of_an_older_snapshot_stops_no_pruning(store: Store, name: str):
    first, second = take(alone(store), 1, 2)
    flip(file_of(store, first, name), 0.5)
    faults = SnapshotCatalog(store).set_damaged_aside(before=second)
    assert list(SnapshotCatalog(store).set_aside_reasons()) == [first.name]
    assert len(faults) == 1
    assert faults == SnapshotCatalog(store).log_faults()
    third, fourth = take(alone(store, second.name, keep=2), 3, 4)
    assert SnapshotCatalog(store).snapshots() == [third, fourth]
    faults = []
    assert SnapshotCatalog(store).rows(faults) == ["2,row\n", "3,row\n", "4,row\n"]
    assert name in faults[0]


def test_many_snapshots_are_read_once_for_damages_and_the_log(store: Store, monkeypatch: pytest.MonkeyPatch):
    *older, newest = take(alone(store, keep=9), 1, 2, 3, 4)
    reads: Counter[str] = Counter()
    read_file = store.read

    def counted(path: str) -> bytes:
        reads[path] += 1
        return read_file(path)

    monkeypatch.setattr(store, "read", counted)
    assert SnapshotCatalog(store).set_damaged_aside(before=newest) == []
    for snapshot in older:
        assert {reads[f"{snapshot.path}/{file}"] for file in ("manifest.json", "metrics.csv")} == {1}


def test_the_newest_readable_snapshot_is_older_than_a_damaged_manifest(store: Store):
    _, good, bad = take(alone(store), 1, 2, 3)
    assert SnapshotCatalog(store).newest_readable() == bad
    flip(file_of(store, bad, "manifest.json"), 0.5)
    assert SnapshotCatalog(store).newest_readable() == good


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found(store: Store, name: str):
    good, bad = take(alone(store), 1, 2)
    file_of(store, bad, name).unlink()
    with pytest.raises(SnapshotDamaged, match=rf"{name} is missing, its manifest says \d+ bytes"):
        SnapshotCatalog(store).verify(bad)
    assert SnapshotCatalog(store).newest_good() == good


@pytest.mark.parametrize("name", FILES[:2])
def test_the_reader_checks_what_it_reads(store: Store, name: str):
    (snapshot,) = take(alone(store), 1)
    size = file_of(store, snapshot, name).stat().st_size
    flip(file_of(store, snapshot, name), 0.6)
    with pytest.raises(SnapshotDamaged, match=rf"{name} has checksum \w+, its manifest says \w+"):
        read(store, snapshot, 0)
    file_of(store, snapshot, name).write_bytes(b"short")
    with pytest.raises(SnapshotDamaged, match=f"{name} has 5 bytes, its manifest says {size}"):
        read(store, snapshot, 0)
    file_of(store, snapshot, name).unlink()
    with pytest.raises(SnapshotDamaged, match="missing"):
        read(store, snapshot, 0)


def test_nothing_good_is_nothing(store: Store):
    assert SnapshotCatalog(store).newest_good() is None
    assert SnapshotCatalog(store).rows() == []
    for snapshot in take(alone(store), 1, 2):
        file_of(store, snapshot, "metrics.csv").write_text("x")
    assert SnapshotCatalog(store).newest_good() is None
    assert len(SnapshotCatalog(store).set_aside_reasons()) == 2
    assert SnapshotCatalog(store).rows() == []


def test_a_snapshot_of_another_run_is_set_aside(store: Store, tmp_path: Path):
    other = Store.open(tmp_path / "runs" / "other")
    (foreign,) = take(alone(other), 9)
    (good,) = take(alone(store), 1)
    Path(other.url, "snapshots", foreign.name).rename(Path(store.url, "snapshots", foreign.name))
    assert SnapshotCatalog(store).snapshots() == [good]
    assert SnapshotCatalog(store).newest_good() == good
    reasons = SnapshotCatalog(store).set_aside_reasons()
    assert [name for name, reason in reasons.items() if "another run" in reason] == [foreign.name]
    assert SnapshotCatalog(store).rows() == ["1,row\n"]


def test_a_renamed_folder_is_set_aside(store: Store):
    first, second = take(alone(store), 1, 2)
    folder = file_of(store, second, "")
    folder.rename(folder.with_name("000000000005-g000001"))
    assert SnapshotCatalog(store).newest_good() == first
    reasons = SnapshotCatalog(store).set_aside_reasons()
    assert "manifest of snapshot 000000000002-g000001" in reasons["000000000005-g000001"]


def test_snapshots_on_a_disk_that_is_not_there_start_no_run_over(store: Store, tmp_path: Path):
    """A newer generation that began afresh would supersede them for good."""
    (snapshot,) = take(alone(store), 1)
    folder, disk = Path(store.url, "snapshots"), tmp_path / "disk"
    folder.rename(disk)
    folder.symlink_to(disk)
    assert SnapshotCatalog(store).newest_good() == snapshot
    away = disk.rename(tmp_path / "away")
    for ask in (
        lambda: SnapshotCatalog(store).newest_good(),
        lambda: store.list("snapshots"),
        lambda: store.write("snapshots/file", b""),
    ):
        with pytest.raises(OSError, match=r"a link that leads nowhere: '.*snapshots'"):
            ask()
    away.rename(disk)
    assert SnapshotCatalog(store).newest_good() == snapshot


def test_a_newer_format_is_not_damage(store: Store):
    (snapshot,) = take(alone(store), 1)
    manifest = {**snapshot.manifest, "format": FORMAT + 1}
    file_of(store, snapshot, "manifest.json").write_bytes(encode_document(manifest))
    with pytest.raises(SnapshotError, match=f"format {FORMAT + 1}, this version reads {FORMAT}"):
        SnapshotCatalog(store).newest_good()
    assert SnapshotCatalog(store).set_aside_reasons() == {}


def test_one_set_aside_by_hand_is_not_taken_but_its_rows_count(store: Store):
    first, second, third = take(alone(store), 1, 2, 3)
    SnapshotCatalog(store).set_aside(second.name, "two resumes died")
    assert SnapshotCatalog(store).set_aside_reasons() == {second.name: "two resumes died"}
    assert SnapshotCatalog(store).snapshots() == [first, third]
    assert SnapshotCatalog(store).rows() == ["1,row\n", "2,row\n", "3,row\n"]
    SnapshotCatalog(store).prune(1)
    assert SnapshotCatalog(store).rows() == ["1,row\n", "2,row\n", "3,row\n"]
    assert store.list("snapshots") == [second.name, third.name]


def test_one_pruned_while_it_is_read_is_not_damaged(store: Store):
    first, second = take(alone(store), 1, 2)
    store.remove(f"snapshots/{second.name}")
    with pytest.raises(SnapshotMissing, match="was removed"):
        SnapshotCatalog(store).verify(second)
    assert SnapshotCatalog(store).newest_good() == first
