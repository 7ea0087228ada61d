"""Snapshots: committed or never happened, damaged ones found before use, one writer, nothing lost by pruning."""

import contextlib
import errno
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from unit.writers import alone, open_writer, state_at, take

from midstride.engine.errors import (
    JobError,
    SnapshotDamaged,
    SnapshotError,
    SnapshotMissing,
    StoreUnsafe,
    Superseded,
    UnsupportedState,
)
from midstride.engine.session.heartbeat import Heartbeat
from midstride.engine.snapshots import metric_segments as segments
from midstride.engine.snapshots.catalog import Position, Snapshot, SnapshotCatalog, snapshot_name
from midstride.engine.snapshots.lease import BLOCK, Lease, acquire, leases, newest, superseded_by
from midstride.engine.snapshots.lineage import Lineage
from midstride.engine.snapshots.reader import read
from midstride.engine.snapshots.retention import Retention
from midstride.engine.snapshots.staging import assign_ranks
from midstride.engine.snapshots.weights import load_weights, save_weights
from midstride.engine.state.codec import differences
from midstride.engine.storage.checksums import decode_document, encode_document
from midstride.engine.storage.store import Store, StoreOptions
from midstride.engine.strategies.single import Single
from midstride.engine.training.checkpointing.run_store import Run
from midstride.engine.training.trainer import Trainer
from midstride.engine.world import World

FILES = ["rank-00000-of-00001.safetensors", "rank-00000-of-00001.json", "metrics.csv"]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "runs" / "digits")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def file_of(store: Store, snapshot: Snapshot, name: str) -> Path:
    return Path(store.url) / "snapshots" / snapshot.name / name


# --- stores ---------------------------------------------------------------------------------------------------------


#: how to find a place that is empty
URLS: dict[str, Callable[[pytest.FixtureRequest], str]] = {
    "local": lambda request: f"{request.getfixturevalue('tmp_path')}/a",
    "file": lambda request: f"file://{request.getfixturevalue('tmp_path')}/a",
    "memory": lambda request: f"memory://{uuid.uuid4().hex}/a",
    "s3": lambda request: f"{request.getfixturevalue('bucket')}/a",
}


@pytest.mark.disk
def test_a_local_store_leaves_no_drafts(tmp_path: Path):
    store = Store.open(tmp_path)
    store.write("a", b"1")
    assert store.create("b", b"2")
    assert not store.create("b", b"3")
    assert names_in(tmp_path) == ["a", "b"]
    assert store.read("b") == b"2"
    store.ensure_writable()
    assert names_in(tmp_path) == ["a", "b"]


@pytest.mark.disk
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = Store.open(tmp_path)
    store.write("a", b"old")

    def no_space(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        store.write("a", b"new")
    monkeypatch.undo()
    assert names_in(tmp_path) == ["a"]
    assert store.read("a") == b"old"


RACER = """
import sys
from midstride.engine.snapshots.lease import acquire
from midstride.engine.storage.store import Store, StoreOptions
assert "torch" not in sys.modules, "reading a run needs no torch"
sys.stdin.readline()
print([acquire(Store.open(sys.argv[1]), None, {}).generation for _ in range(int(sys.argv[2]))])
"""


@pytest.mark.disk
@pytest.mark.parametrize(("where", "each"), [("local", 20), ("s3", 5)])
def test_processes_take_every_generation_once(where: str, each: int, request: pytest.FixtureRequest):
    store = Store.open(URLS[where](request))
    command = [sys.executable, "-c", RACER, store.url, str(each)]
    racers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = []
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for racer in racers:
        out, _ = racer.communicate()
        answers.append(json.loads(out))
    assert sorted(number for numbers in answers for number in numbers) == list(range(1, 3 * each + 1))
    assert [lease.generation for lease in leases(store)] == list(range(1, 3 * each + 1))
    assert len({lease.run_id for lease in leases(store)}) == 1


def test_a_store_that_cannot_be_written_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreUnsafe, match=r"file/runs cannot be written: .*snapshots\.url"):
        Store.open(tmp_path / "file" / "runs").ensure_writable()


def test_stores_without_exclusive_creation_are_refused_by_name():
    with pytest.raises(StoreUnsafe, match=r"memory://.*snapshots\.url"):
        Store.open("memory://bucket/runs").ensure_writable()
    with pytest.raises(StoreUnsafe, match="nowhere://"):
        Store.open("nowhere://bucket/runs")


def test_whoever_sees_to_it_that_one_world_has_a_run_may_use_any_store():
    store = Store.open(f"memory://{uuid.uuid4().hex}/runs", StoreOptions(lease="none"))
    store.ensure_writable()
    assert store.at("a").create("b", b"1")
    assert not store.at("a").create("b", b"2")
    assert store.read("a/b") == b"1"


def test_a_url_with_a_password_is_refused_without_repeating_it():
    with pytest.raises(StoreUnsafe, match="holds a password, which would stand") as refused:
        Store.open("sftp://me:open-sesame@host/runs")
    with pytest.raises(JobError, match="holds a password") as also:
        Trainer(snapshots={"url": "sftp://me:open-sesame@host/runs"})
    assert "sesame" not in f"{refused.value}{also.value}"


def test_any_flipped_byte_of_a_document_is_found():
    data = encode_document({"name": "é", "numbers": [1, 2.5, float("inf")], "nested": {10: (1, 2), 9: None}})
    assert decode_document(data, "here") == {
        "name": "é",
        "numbers": [1, 2.5, float("inf")],
        "nested": {"10": [1, 2], "9": None},
    }
    for index in range(len(data)):
        for bit in (1, 32):
            damaged = bytearray(data)
            damaged[index] ^= bit
            with pytest.raises(SnapshotDamaged, match="here"):
                decode_document(bytes(damaged), "here")


# --- one writer, one reader -----------------------------------------------------------------------------------------


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
    assert manifest["progress"] == {"step": 20}
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
    assert SnapshotCatalog(store).aside() == []
    assert SnapshotCatalog(store).rows() == ["1,row\n"]
    with pytest.raises(SnapshotError, match="a fault"):
        writer.check()  # what went wrong is told until the run ends
    take(alone(store, first.name), 3)
    assert store.list("snapshots") == ["000000000001-g000001", "000000000003-g000002"]
    assert SnapshotCatalog(store).rows() == ["1,row\n", "3,row\n"]


def test_a_snapshot_that_cannot_be_encoded_leaves_nothing(store: Store):
    writer = alone(store)
    with pytest.raises(UnsupportedState, match=r"rank 0 says.*\n.*module/hook: function"):
        writer.take(Position(1), {"module": {"hook": lambda: 0}}, "", {})
    assert store.list("snapshots") == []


# --- law 2: damage --------------------------------------------------------------------------------------------------


def _flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[min(int(len(data) * at), len(data) - 1)] ^= 1
    path.write_bytes(data)


def _truncate(path: Path, at: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * at)])


DAMAGES: dict[str, Callable[[Path], None]] = {
    **{f"flipped at {at}": lambda path, at=at: _flip(path, at) for at in (0.0, 0.1, 0.5, 0.9, 1.0)},  # type: ignore[misc]
    **{f"truncated at {at}": lambda path, at=at: _truncate(path, at) for at in (0.0, 0.3, 0.7, 0.99)},  # type: ignore[misc]
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0") and None,
}


@pytest.mark.parametrize("damage", list(DAMAGES))
@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_damage_is_found_and_the_newest_good_one_is_taken(
    store: Store, name: str, damage: str, caplog: pytest.LogCaptureFixture
):
    good, bad = take(alone(store), 1, 2)
    DAMAGES[damage](file_of(store, bad, name))
    assert SnapshotCatalog(store).newest_good() == good
    ((aside, reason),) = SnapshotCatalog(store).aside()
    assert aside == bad.name
    assert name in reason
    assert f"snapshot {bad.name} is set aside" in caplog.text
    assert SnapshotCatalog(store).snapshots() == [good]
    assert file_of(store, bad, name).exists()
    caplog.clear()
    assert SnapshotCatalog(store).newest_good() == good
    assert caplog.text == ""


def _make_folder_of(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _make_full_folder_of(path: Path) -> None:
    _make_folder_of(path)
    (path / "file").touch()


def _link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _nest_deep(path: Path) -> None:
    path.write_bytes(b"[" * 1_000_000)


@contextlib.contextmanager
def _unreadable(folder: Path) -> Iterator[None]:
    """Nothing below `folder` can be read, whoever asks."""
    real: Any = io.open
    with pytest.MonkeyPatch.context() as patch:

        def refuse(file: Any, *arguments: Any, **options: Any) -> Any:
            if str(file).startswith(f"{folder}/") and "manifest" not in str(file):
                raise OSError(errno.EIO, "Input/output error", str(file))
            return real(file, *arguments, **options)

        patch.setattr(io, "open", refuse)
        yield


#: what keeps a snapshot from being read -> what is said of it
UNREADABLE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a folder in its place": (_make_folder_of, "cannot be read: Is a directory"),
    "a full folder in its place": (_make_full_folder_of, "cannot be read: Is a directory"),
    "a loop of links": (_link_to_itself, "cannot be read: Too many levels of symbolic links"),
}


@pytest.mark.parametrize("how", UNREADABLE)
@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_what_cannot_be_read_is_set_aside_in_words_of_its_own(
    store: Store, name: str, how: str, caplog: pytest.LogCaptureFixture
):
    good, bad = take(alone(store), 1, 2)
    spoil, words = UNREADABLE[how]
    spoil(file_of(store, bad, name))
    assert SnapshotCatalog(store).newest_good() == good
    ((aside, reason),) = SnapshotCatalog(store).aside()
    assert aside == bad.name
    assert words in reason
    assert f"snapshot {bad.name} is set aside, an older one is taken" in caplog.text


def test_a_manifest_nested_deep_and_a_file_instead_of_a_snapshot_are_damage(
    store: Store, caplog: pytest.LogCaptureFixture
):
    good, second, third = take(alone(store), 1, 2, 3)
    _nest_deep(file_of(store, second, "manifest.json"))
    shutil.rmtree(file_of(store, third, ""))
    file_of(store, third, "").touch()
    assert SnapshotCatalog(store).newest_good() == good
    assert "is no JSON document with a checksum: maximum recursion depth" in caplog.text
    assert f"{third.name} cannot be read: it is no folder" in caplog.text


def test_a_disk_that_cannot_be_read_is_no_damage(store: Store):
    """Nothing is set aside before something else could be read: else a bad mount would start the run over."""
    good, bad = take(alone(store), 1, 2)
    with (
        _unreadable(file_of(store, bad, "").parent),
        pytest.raises(SnapshotDamaged, match="cannot be read: Input/output error"),
    ):
        SnapshotCatalog(store).newest_good()
    assert SnapshotCatalog(store).aside() == []
    with _unreadable(file_of(store, bad, "")):
        assert SnapshotCatalog(store).newest_good() == good
    assert [name for name, _ in SnapshotCatalog(store).aside()] == [bad.name]


@pytest.mark.parametrize("name", ["metrics.csv", "manifest.json"])
def test_damage_of_an_older_snapshot_stops_no_pruning(store: Store, name: str):
    first, second = take(alone(store), 1, 2)
    _flip(file_of(store, first, name), 0.5)
    SnapshotCatalog(store).set_damaged_aside(before=second)
    assert [aside for aside, _ in SnapshotCatalog(store).aside()] == [first.name]
    third, fourth = take(alone(store, second.name, keep=2), 3, 4)
    assert SnapshotCatalog(store).snapshots() == [third, fourth]
    faults: list[str] = []
    assert SnapshotCatalog(store).rows(faults) == ["2,row\n", "3,row\n", "4,row\n"]
    assert name in faults[0]


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
    _flip(file_of(store, snapshot, name), 0.6)
    with pytest.raises(SnapshotDamaged, match=rf"{name} has checksum \w+, its manifest says \w+"):
        read(store, snapshot, 0)
    file_of(store, snapshot, name).write_bytes(b"short")
    with pytest.raises(SnapshotDamaged, match=f"{name} has 5 bytes, its manifest says {size}"):
        read(store, snapshot, 0)
    file_of(store, snapshot, name).unlink()
    with pytest.raises(SnapshotDamaged, match="missing"):
        read(store, snapshot, 0)


def test_a_missing_manifest_means_it_never_happened(store: Store):
    good, bad = take(alone(store), 1, 2)
    file_of(store, bad, "manifest.json").unlink()
    assert SnapshotCatalog(store).newest_good() == good
    assert SnapshotCatalog(store).aside() == []


def test_nothing_good_is_nothing(store: Store):
    assert SnapshotCatalog(store).newest_good() is None
    assert SnapshotCatalog(store).rows() == []
    for snapshot in take(alone(store), 1, 2):
        file_of(store, snapshot, "metrics.csv").write_text("x")
    assert SnapshotCatalog(store).newest_good() is None
    assert len(SnapshotCatalog(store).aside()) == 2
    assert SnapshotCatalog(store).rows() == []


def test_a_snapshot_of_another_run_is_set_aside(store: Store, tmp_path: Path):
    other = Store.open(tmp_path / "runs" / "other")
    (foreign,) = take(alone(other), 9)
    (good,) = take(alone(store), 1)
    Path(other.url, "snapshots", foreign.name).rename(Path(store.url, "snapshots", foreign.name))
    assert SnapshotCatalog(store).snapshots() == [good]
    assert SnapshotCatalog(store).newest_good() == good
    assert [name for name, reason in SnapshotCatalog(store).aside() if "another run" in reason] == [foreign.name]
    assert SnapshotCatalog(store).rows() == ["1,row\n"]


def test_a_renamed_folder_is_set_aside(store: Store):
    first, second = take(alone(store), 1, 2)
    folder = file_of(store, second, "")
    folder.rename(folder.with_name("000000000005-g000001"))
    assert SnapshotCatalog(store).newest_good() == first
    assert "manifest of snapshot 000000000002-g000001" in dict(SnapshotCatalog(store).aside())["000000000005-g000001"]


def test_a_run_may_be_moved_as_a_whole(store: Store, tmp_path: Path):
    (snapshot,) = take(alone(store), 1)
    Path(store.url).rename(tmp_path / "elsewhere")
    assert SnapshotCatalog(Store.open(tmp_path / "elsewhere")).newest_good() == snapshot


def test_a_newer_format_is_not_damage(store: Store):
    (snapshot,) = take(alone(store), 1)
    manifest = {**snapshot.manifest, "format": 2}
    file_of(store, snapshot, "manifest.json").write_bytes(encode_document(manifest))
    with pytest.raises(SnapshotError, match="format 2, this version reads 1"):
        SnapshotCatalog(store).newest_good()
    assert SnapshotCatalog(store).aside() == []


def test_one_set_aside_by_hand_is_not_taken_but_its_rows_count(store: Store):
    first, second, third = take(alone(store), 1, 2, 3)
    SnapshotCatalog(store).set_aside(second, "two resumes died")
    assert SnapshotCatalog(store).aside() == [(second.name, "two resumes died")]
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


# --- law 5: generations ---------------------------------------------------------------------------------------------


def test_a_late_commit_of_a_stale_generation_is_never_read(store: Store):
    stale = alone(store)
    first, _second = take(stale, 1, 2)
    late = open_writer(store, Lease(1, None, newest(store).run_id), World(), lambda value: [value], "digits", 100)
    current = alone(store, resumed_from=first.name)
    (mine,) = take(current, 2)
    # As if the check of the lease had passed a moment before the newer world took it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("midstride.engine.snapshots.committer.ensure_newest", lambda store, lease: None)
        (stray,) = take(late, 3)
    assert store.exists(f"snapshots/{stray.name}/manifest.json")
    assert SnapshotCatalog(store).snapshots() == [first, mine]
    assert SnapshotCatalog(store).newest_good() == mine
    assert SnapshotCatalog(store).rows() == ["1,row\n", "2,row\n"]


def test_a_superseded_writer_finds_out_and_commits_nothing(store: Store):
    stale = alone(store)
    (first,) = take(stale, 1)
    assert superseded_by(store, Lease(1, None)) is None
    current = alone(store, resumed_from=first.name)
    with pytest.raises(Superseded, match=r"generation 2 advances .* now, this world is generation 1"):
        take(stale, 2)
    assert SnapshotCatalog(store).snapshots() == [first]
    (mine,) = take(current, 2)
    assert SnapshotCatalog(store).snapshots() == [first, mine]
    assert superseded_by(store, Lease(1, None)) == newest(store)
    assert store.list("snapshots") == [first.name, mine.name]  # what the stale one left is swept


def test_a_superseded_writer_removes_nothing(store: Store, caplog: pytest.LogCaptureFixture):
    retention = Retention(store, acquire(store, None, {}), keep=1)
    first, second = take(alone(store), 1, 2)  # of the next generation
    for snapshot in (first, second):
        retention.add(snapshot, "")
    assert "generation 2 advances" in caplog.text
    assert SnapshotCatalog(store).snapshots() == [first, second]


def test_a_superseded_run_replaces_nothing_that_others_read(store: Store):
    run = Run(store.url, Single(), 3, Heartbeat())
    run.begin(None)
    try:
        run.write("run.json", "mine")
        run.assemble_metric_log()
        acquire(store, None, {})
        for replace in (lambda: run.write("run.json", "late"), run.assemble_metric_log):
            with pytest.raises(Superseded, match="generation 2 advances"):
                replace()
    finally:
        run.close()
    assert store.read("run.json") == b"mine"


def test_a_generation_whose_answer_was_lost_is_taken_once(store: Store, monkeypatch: pytest.MonkeyPatch):
    """NFS asks again where an answer was lost, and is told that the file is there."""
    created = type(store).create
    monkeypatch.setattr(type(store), "create", lambda *args: created(*args) and False)
    assert [acquire(store, None, {}).generation for _ in range(2)] == [1, 2]
    assert len(leases(store)) == 2


def test_lineage_follows_the_leases(store: Store):
    a1, a2, _a3 = take(alone(store), 1, 2, 3)
    (_b4,) = take(alone(store, a2.name), 4)
    (c3,) = take(alone(store, a2.name), 3)
    d4, d5 = take(alone(store, c3.name), 4, 5)
    alone(store, d4.name)
    assert SnapshotCatalog(store).snapshots() == [a1, a2, c3, d4]
    assert SnapshotCatalog(store).rows() == ["1,row\n", "2,row\n", "3,row\n", "4,row\n"]
    assert d5 not in SnapshotCatalog(store).snapshots()
    assert [lease.resumed_from for lease in leases(store)] == [None, a2.name, a2.name, c3.name, d4.name]


def test_a_fresh_start_forgets_the_older_generations(store: Store):
    take(alone(store), 1, 2)
    (new,) = take(alone(store, None), 1)
    assert SnapshotCatalog(store).snapshots() == [new]
    assert SnapshotCatalog(store).rows() == ["1,row\n"]


def test_places_inside_a_step_cut_the_lineage_too(store: Store):
    writer = alone(store)
    (first,) = take(writer, 5)
    inside = [writer.take(Position(5, after), state_at(5), "", {}).future.result() for after in (1, 2, 3)]
    alone(store, inside[1].name)
    assert SnapshotCatalog(store).snapshots() == [first, inside[0], inside[1]]


@pytest.mark.parametrize("damage", [lambda path: _flip(path, 0.5), lambda path: path.unlink()])
def test_a_damaged_lease_is_named(store: Store, damage: Callable[[Path], None]):
    (first,) = take(alone(store), 1)
    alone(store, first.name)
    damage(Path(store.url, "lease", "000001.json"))
    assert SnapshotCatalog(store).newest_good() == first, "the newest lease tells the whole lineage"
    damage(Path(store.url, "lease", "000002.json"))
    with pytest.raises(SnapshotDamaged, match=r"lease/00000[12]\.json .*start over under another run name"):
        SnapshotCatalog(store).newest_good()


def test_a_lease_that_is_gone_or_of_another_generation_is_named(store: Store):
    (first,) = take(alone(store), 1)
    take(alone(store, first.name), 2)
    first_lease, second = (Path(store.url, "lease", f"00000{number}.json") for number in (1, 2))
    second.write_bytes(first_lease.read_bytes())
    with pytest.raises(SnapshotDamaged, match=r"000002\.json is the lease of generation 1"):
        acquire(store, None, {})
    second.unlink()
    with pytest.raises(SnapshotDamaged, match=r"000002\.json is missing, and snapshot 000000000002-g000002 is of that"):
        SnapshotCatalog(store).newest_good()


def test_leases_as_an_older_version_wrote_them_are_followed_one_by_one(store: Store):
    name = None
    for life in range(1, 5):
        document = {"generation": life, "resumed_from": name, "run_id": "one", "facts": {}, "time": 0.0, "nonce": "n"}
        store.create(f"lease/{life:06d}.json", encode_document(document))
        name = snapshot_name(Position(life), life)
    assert Lineage.of(store).ends == {4: None, 3: Position(3), 2: Position(2), 1: Position(1)}
    lease = acquire(store, name, {})
    assert lease.ancestors == tuple(snapshot_name(Position(life), life) for life in (4, 3, 2, 1))
    store.remove("lease/000002.json")
    assert Lineage.of(store).ends == {5: None, **{life: Position(life) for life in range(1, 5)}}


def test_two_leases_tell_the_lineage_of_many_lives(store: Store, monkeypatch: pytest.MonkeyPatch):
    name, lives = None, 3 * BLOCK + 7
    for life in range(1, lives + 1):
        acquire(store, name, {})
        name = snapshot_name(Position(life), life)
    asked: list[str] = []
    whole = type(store).read
    monkeypatch.setattr(type(store), "read", lambda self, path: asked.append(path) or whole(self, path))
    ends = Lineage.of(store).ends
    assert ends == {lives: None, **{life: Position(life) for life in range(1, lives)}}
    assert len(asked) == 2


# --- pruning --------------------------------------------------------------------------------------------------------


def test_pruning_keeps_the_newest_and_every_row(store: Store):
    writer = alone(store, keep=2)
    taken = take(writer, *range(1, 7))
    assert SnapshotCatalog(store).snapshots() == taken[-2:]
    assert store.list("snapshots") == [snapshot.name for snapshot in taken[-2:]]
    assert SnapshotCatalog(store).rows() == [f"{step},row\n" for step in range(1, 7)]
    (more,) = take(alone(store, taken[4].name, keep=2), 6)
    assert SnapshotCatalog(store).snapshots() == [taken[4], more]
    assert SnapshotCatalog(store).rows() == [f"{step},row\n" for step in range(1, 7)]
    assert SnapshotCatalog(store).prune(1) == [taken[4].name]


def test_those_named_beside_stay(store: Store):
    taken = take(alone(store), 1, 2, 3, 4)
    assert SnapshotCatalog(store).prune(1, also={taken[1].name}) == [taken[0].name, taken[2].name]
    assert SnapshotCatalog(store).snapshots() == [taken[1], taken[3]]
    assert len(SnapshotCatalog(store).rows()) == 4


class Killed(BaseException):
    """What a SIGKILL is to a test."""


def test_a_kill_at_any_moment_of_pruning_loses_nothing(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    taken = take(alone(store), 1, 2, 3)
    for deadly in range(20):
        left = [deadly]

        def count(call: Callable[..., Any], left: list[int] = left) -> Callable[..., Any]:
            def counted(*args: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
                return call(*args)

            return counted

        with monkeypatch.context() as patch:
            for verb in ("write", "remove"):
                patch.setattr(type(store), verb, count(getattr(type(store), verb)))
            try:
                SnapshotCatalog(store).prune(1)
                finished = True
            except Killed:
                finished = False
        assert SnapshotCatalog(store).newest_good() == taken[-1]
        assert SnapshotCatalog(store).aside() == []
        assert SnapshotCatalog(store).rows() == ["1,row\n", "2,row\n", "3,row\n"]
        if finished:
            break
    assert finished
    SnapshotCatalog(store).prune(1)
    assert store.list("snapshots") == [taken[-1].name]


def test_a_long_run_does_not_pile_up_files(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(segments, "FOLD", 4)
    taken = take(alone(store, keep=1), *range(1, 31))
    single, *files = store.list("metrics")
    assert single.startswith(taken[28].name)
    assert files == [
        *(f"folded-1-{taken[last - 1].name}.json" for last in (20, 24, 28)),
        f"folded-2-{taken[15].name}.json",
    ]
    assert SnapshotCatalog(store).rows() == [f"{step},row\n" for step in range(1, 31)]
    file = Path(store.url, "metrics", files[0])
    _flip(file, 0.5)
    with pytest.raises(SnapshotDamaged, match=f"metrics/{file.name}"):
        SnapshotCatalog(store).rows()


@pytest.mark.parametrize("deadly", range(7))
def test_a_kill_at_any_moment_of_folding_loses_nothing(store: Store, monkeypatch: pytest.MonkeyPatch, deadly: int):
    monkeypatch.setattr(segments, "FOLD", 4)
    kept = segments.MetricSegments(store)
    for step in range(3):
        kept.add(snapshot_name(Position(step), 1), f"{step},row\n")
    calls = []

    def count(verb: str) -> Callable[..., Any]:
        real = getattr(type(store), verb)

        def counted(*args: Any) -> Any:
            calls.append(verb)
            if len(calls) > deadly:
                raise Killed
            return real(*args)

        return counted

    with monkeypatch.context() as patch:
        for verb in ("write", "remove"):
            patch.setattr(type(store), verb, count(verb))
        try:
            kept.add(snapshot_name(Position(3), 1), "3,row\n")
        except Killed:
            calls.append("killed")
    assert ("killed" in calls) == (deadly < 6)  # two writes, four removals
    assert list(kept.read()[0].values()) == [f"{step},row\n" for step in range(4 if deadly else 3)]
    for step in range(4 if deadly else 3, 12):
        kept.add(snapshot_name(Position(step), 1), f"{step},row\n")
    assert sorted(kept.read()[0].values()) == sorted(f"{step},row\n" for step in range(12))


def test_damaged_rows_are_named(store: Store):
    taken = take(alone(store, keep=1), 1, 2)
    (file,) = store.list("metrics")
    assert file.startswith(taken[0].name)
    _flip(Path(store.url, "metrics", file), 0.5)
    with pytest.raises(SnapshotDamaged, match=f"metrics/{file} has checksum"):
        SnapshotCatalog(store).rows()


def test_old_snapshots_that_cannot_be_removed_do_not_stop_the_run(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    writer = alone(store, keep=1)
    take(writer, 1)

    def refuse(*args: Any) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(type(store), "remove", refuse)
    take(writer, 2)
    monkeypatch.undo()
    assert "could not be removed: not yours" in caplog.text
    (third,) = take(writer, 3)
    assert SnapshotCatalog(store).snapshots() == [third]
    assert len(SnapshotCatalog(store).rows()) == 3


# --- three ranks ----------------------------------------------------------------------------------------------------


class Ranks:
    """A world of threads whose gather is a barrier."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=100)
        self._values: list[Any] = [None] * size

    def gather(self, rank: int) -> Callable[[object], list[Any]]:
        def gather(value: object) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
            return values

        return gather

    def run(self, act: Callable[[World, Callable[[object], list[Any]]], Any]) -> list[Any]:
        """Return what every rank returned or raised."""

        def one(rank: int) -> Any:
            try:
                return act(World(rank=rank, size=self.size), self.gather(rank))
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, range(self.size)))


def state_of(rank: int, shift: float = 0.0) -> dict[str, Any]:
    module = {f"layer{i}.weight": torch.full((10 * (i + 1), 7), float(i) + shift).t() for i in range(5)}
    return {"module": module, "metrics": {"total": torch.tensor(float(rank))}, "rng": torch.arange(rank + 2)}


def take_with(
    store: Store,
    lease: Lease,
    state: Callable[[int], Any] = state_of,
    replicated: Callable[[str], bool] = lambda path: path.startswith("module/"),
    probes: dict[int, Callable[[str], object]] | None = None,
) -> list[Any]:
    def act(world: World, gather: Callable[[object], list[Any]]) -> Snapshot:
        writer = open_writer(store, lease, world, gather, "digits", 3, replicated)
        probe = (probes or {}).get(world.rank, lambda phase: None)
        return writer.take(Position(4), state(world.rank), "4,row\n", {}, probe).future.result()

    return Ranks(3).run(act)


def test_three_ranks_write_one_snapshot(store: Store):
    taken = take_with(store, acquire(store, None, {}))
    assert taken[0] == taken[1] == taken[2] == SnapshotCatalog(store).newest_good()
    for rank in range(3):
        back = read(store, taken[0], rank)
        assert differences(state_of(rank), back) == []
        assert back["module"]["layer1.weight"].stride() == state_of(0)["module"]["layer1.weight"].stride()
    with pytest.raises(SnapshotError, match="taken by 3 ranks, it has no part for rank 3"):
        read(store, taken[0], 3)


def test_replicated_tensors_are_written_once_and_dealt_by_size(store: Store):
    (snapshot, *_) = take_with(store, acquire(store, None, {}))
    sizes = [snapshot.manifest["files"][f"rank-0000{rank}-of-00003.safetensors"]["bytes"] for rank in range(3)]
    whole = sum(tensor.nbytes for tensor in state_of(0)["module"].values())
    assert whole < sum(sizes) < 1.6 * whole + 1500  # the rest is headers and what each rank has of its own
    assert max(sizes) < 0.6 * sum(sizes)


def test_dealing_is_fair_and_repeatable():
    sizes = {f"t{number}": number * 10 for number in range(20)}
    dealt = assign_ranks(sizes, 3)
    assert dealt == assign_ranks(dict(reversed(sizes.items())), 3)
    loads = [sum(sizes[name] for name, rank in dealt.items() if rank == mine) for mine in range(3)]
    assert max(loads) - min(loads) <= 30
    assert assign_ranks({}, 3) == {}


def _fail(words: str, at: str = "snapshot_write") -> Callable[[str], None]:
    def probe(phase: str) -> None:
        if phase == at:
            raise OSError(28, words)

    return probe


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("phase", ["snapshot_write", "before_commit"])
def test_an_error_of_one_rank_reaches_all(store: Store, rank: int, phase: str):
    errors = take_with(store, acquire(store, None, {}), probes={rank: _fail("No space left", phase)})
    for error in errors:
        assert type(error) is SnapshotError
        assert f"rank {rank} says: OSError: [Errno 28] No space left" in str(error)
    assert isinstance(errors[rank].__cause__, OSError)
    if phase == "snapshot_write" or rank == 0:
        assert SnapshotCatalog(store).snapshots() == []


def test_an_error_after_the_commit_does_not_undo_it(store: Store):
    errors = take_with(store, acquire(store, None, {}), probes={2: _fail("too late", "before_commit")})
    assert [type(error) for error in errors] == [SnapshotError] * 3
    committed = SnapshotCatalog(store).newest_good()
    assert committed is None or differences(state_of(1), read(store, committed, 1)) == []


def test_state_that_cannot_be_written_is_the_same_error_everywhere(store: Store):
    errors = take_with(store, acquire(store, None, {}), lambda rank: {"hook": print} if rank == 1 else state_of(rank))
    assert [type(error) for error in errors] == [UnsupportedState] * 3
    assert all("rank 1 says" in str(error) for error in errors)
    assert SnapshotCatalog(store).snapshots() == []


def test_ranks_that_do_not_agree_on_what_is_replicated_are_refused(store: Store):
    def state(rank: int) -> Any:
        return {"module": {"a": torch.ones(2), **({"b": torch.ones(3)} if rank == 2 else {})}}

    errors = take_with(store, acquire(store, None, {}), state)
    assert all(
        type(error) is SnapshotError and "rank 2 and rank 0 do not hold the same" in str(error) for error in errors
    )


def test_a_store_that_ranks_do_not_share_is_refused(store: Store, tmp_path: Path):
    lease = acquire(store, None, {})

    def act(world: World, gather: Callable[[object], list[Any]]) -> Snapshot:
        own = store if world.is_first else Store.open(tmp_path / f"node{world.rank}")
        return (
            open_writer(own, lease, world, gather, "digits", 3)
            .take(Position(4), state_of(world.rank), "", {})
            .future.result()
        )

    errors = Ranks(3).run(act)
    assert all("rank 0 sees no such file: all ranks must share one store" in str(error) for error in errors)


def test_superseded_reaches_every_rank(store: Store):
    lease = acquire(store, None, {})
    acquire(store, None, {})
    assert [type(error) for error in take_with(store, lease)] == [Superseded] * 3


# --- weights --------------------------------------------------------------------------------------------------------


def test_weights_come_back_tied_and_in_their_memory_format(store: Store):
    module = nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.Linear(3, 3), nn.Linear(3, 3))
    module[2].weight = module[1].weight
    save_weights(
        store, "best", module.state_dict(), {"val/accuracy": 0.5, "bad": float("inf")}, {"step": 12, "epoch": 1}
    )
    back = load_weights(store, "best")
    assert differences(module.state_dict(), back.state_dict) == []
    assert back.state_dict["0.weight"].is_contiguous(memory_format=torch.channels_last)
    assert back.state_dict["1.weight"].data_ptr() == back.state_dict["2.weight"].data_ptr()
    assert back.metrics == {"val/accuracy": 0.5, "bad": float("inf")}
    assert back.facts == {"step": 12, "epoch": 1}


def test_newer_weights_replace_older_ones(store: Store):
    for step, value in ((1, 1.0), (2, 2.0), (2, 3.0), (2, 3.0)):
        save_weights(store, "last", {"w": torch.tensor(value)}, {}, {"step": step})
        assert load_weights(store, "last").state_dict["w"] == value
        assert len(store.list("last")) == 2


@pytest.mark.disk
def test_a_kill_while_weights_are_replaced_leaves_whole_ones(store: Store, monkeypatch: pytest.MonkeyPatch):
    save_weights(store, "last", {"w": torch.tensor(1.0)}, {}, {"step": 1})
    whole = type(store).write

    def die_at_the_manifest(self: Store, path: str, data: bytes, **options: Any) -> None:
        if path == "last/000000000001-g000001.json":
            raise Killed
        whole(self, path, data, **options)

    monkeypatch.setattr(type(store), "write", die_at_the_manifest)
    with pytest.raises(Killed):
        save_weights(store, "last", {"w": torch.tensor(2.0)}, {}, {"step": 1})
    monkeypatch.undo()
    assert load_weights(store, "last").state_dict["w"] == 1.0


def test_damaged_and_missing_weights_are_named(store: Store):
    with pytest.raises(SnapshotMissing, match=r"no weights were saved in .*/best"):
        load_weights(store, "best")
    save_weights(store, "best", {"w": torch.ones(5)}, {}, {})
    (file,) = [name for name in store.list("best") if name.startswith("weights-")]
    path = Path(store.url, "best", file)
    _flip(path, 0.9)
    with pytest.raises(SnapshotDamaged, match=f"{file} has checksum"):
        load_weights(store, "best")
    path.unlink()
    with pytest.raises(SnapshotDamaged, match=f"{file} is missing"):
        load_weights(store, "best")
    manifest = Path(store.url, "best", "000000000000-g000001.json")
    _flip(manifest, 0.5)
    with pytest.raises(SnapshotDamaged, match=manifest.name):
        load_weights(store, "best")
