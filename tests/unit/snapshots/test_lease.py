"""Law 5: generations of a run, and which of them may write."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.snapshot_files import flip
from support.snapshot_writers import alone, open_writer, state_at, take

from midstride.engine.checkpointing.run_store import RunStore
from midstride.engine.errors import SnapshotDamaged, StoreUnsafe, Superseded
from midstride.engine.session.heartbeat import Heartbeat
from midstride.engine.snapshots.catalog import Position, SnapshotCatalog, snapshot_name
from midstride.engine.snapshots.lease import BLOCK, Lease, acquire, leases, newest
from midstride.engine.snapshots.lineage import Lineage
from midstride.engine.snapshots.repair import repairs
from midstride.engine.snapshots.schedule import Retention
from midstride.engine.storage.store import Store
from midstride.engine.strategies.single import Single
from midstride.engine.world import World


def test_a_late_commit_of_a_stale_generation_is_never_read(store: Store):
    stale = alone(store)
    first, _second = take(stale, 1, 2)
    late = open_writer(store, Lease(1, None, newest(store).run_id), World(), lambda value: [value], "digits", 100)
    current = alone(store, resumed_from=first.name)
    (mine,) = take(current, 2)
    # As if the check of the lease had passed a moment before the newer world took it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("midstride.engine.snapshots.committer.ensure_newest", lambda *_, **__: None)
        (stray,) = take(late, 3)
    assert store.exists(f"snapshots/{stray.name}/manifest.json")
    assert SnapshotCatalog(store).snapshots() == [first, mine]
    assert SnapshotCatalog(store).newest_good() == mine
    assert SnapshotCatalog(store).rows() == ["1,row\n", "2,row\n"]


def test_a_superseded_writer_finds_out_and_commits_nothing(store: Store):
    stale = alone(store)
    (first,) = take(stale, 1)
    current = alone(store, resumed_from=first.name)
    with pytest.raises(Superseded, match=r"\(generation 2\) has taken over .*: this one \(generation 1\) has stopped"):
        take(stale, 2)
    assert SnapshotCatalog(store).snapshots() == [first]
    (mine,) = take(current, 2)
    assert SnapshotCatalog(store).snapshots() == [first, mine]
    assert store.list("snapshots") == [first.name, mine.name]  # what the stale one left is swept


@pytest.mark.parametrize("what", ["", "lease"])
def test_a_lease_that_was_removed_under_a_world_is_written_again(
    store: Store, caplog: pytest.LogCaptureFixture, what: str
):
    first = alone(store)
    (begun,) = take(first, 1)
    second = alone(store, resumed_from=begun.name)
    take(second, 2)
    store.remove(what)
    (goes_on,) = take(second, 3)
    take(second, 4)
    assert [lease.generation for lease in leases(store)] == [2]
    assert [r.message.partition(". ")[0] for r in caplog.records] == [
        f"{store.url}/lease/000002.json was removed during training, and is written again"
    ]
    third = alone(store, resumed_from=goes_on.name)
    (mine,) = take(third, 4)
    assert SnapshotCatalog(store).newest_good() == mine
    assert goes_on in SnapshotCatalog(store).snapshots()


@pytest.mark.parametrize("generation", [1, 2])
def test_a_world_whose_folder_another_run_has_taken_stops(store: Store, generation: int):
    before = alone(store)
    (begun,) = take(before, 1)
    if generation == 2:
        before = alone(store, resumed_from=begun.name)
    store.remove("")
    other = alone(store)
    said = rf"was emptied and another run has started there: this .* \(generation {generation} of the earlier run\)"
    with pytest.raises(Superseded, match=said):
        take(before, 2)
    (mine,) = take(other, 1)
    assert SnapshotCatalog(store).snapshots() == [mine]


def test_a_damaged_lease_of_its_own_keeps_no_world_from_going_on(store: Store):
    writer = alone(store)
    store.write("lease/000001.json", b"{")
    take(writer, 1)
    with pytest.raises(SnapshotDamaged, match=r"lease/000001\.json .*`midstride snapshots repair`"):
        leases(store)


def test_a_superseded_writer_removes_nothing(store: Store, caplog: pytest.LogCaptureFixture):
    retention = Retention(store, acquire(store, None, {}), keep=1)
    first, second = take(alone(store), 1, 2)  # of the next generation
    for snapshot in (first, second):
        retention.add(snapshot, "")
    assert "another attempt (generation 2)" in caplog.text
    assert SnapshotCatalog(store).snapshots() == [first, second]


def test_a_superseded_run_replaces_nothing_that_others_read(store: Store):
    run = RunStore(store.url, Single(), 3, Heartbeat())
    run.begin(None)
    try:
        run.write("run.json", "mine")
        run.assemble_metric_log()
        acquire(store, None, {})
        for replace in (lambda: run.write("run.json", "late"), run.assemble_metric_log):
            with pytest.raises(Superseded, match=r"another attempt \(generation 2\)"):
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


@pytest.mark.parametrize("damage", [lambda path: flip(path, 0.5), lambda path: path.unlink()])
def test_a_damaged_lease_is_named(store: Store, damage: Callable[[Path], None]):
    (first,) = take(alone(store), 1)
    alone(store, first.name)
    damage(Path(store.url, "lease", "000001.json"))
    assert SnapshotCatalog(store).newest_good() == first, "the newest lease tells the whole lineage"
    damage(Path(store.url, "lease", "000002.json"))
    with pytest.raises(SnapshotDamaged, match=r"lease/00000[12]\.json .*start over under another run name"):
        SnapshotCatalog(store).newest_good()


@pytest.mark.parametrize("refused", ["lease/000001.json", "lease/000002.json", "snapshots/000000000001-g000001/"])
def test_what_the_store_refuses_is_no_damage_and_is_not_repaired(
    store: Store, refused: str, monkeypatch: pytest.MonkeyPatch
):
    (first,) = take(alone(store), 1)
    alone(store, first.name)
    read = type(store).read

    def refuse(self: Store, path: str, *arguments: Any) -> bytes:
        if path.startswith(refused):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return read(self, path, *arguments)

    monkeypatch.setattr(type(store), "read", refuse)
    with pytest.raises(StoreUnsafe, match=rf"/{refused}.*cannot be read: Permission denied\. Allow it\.$"):
        repairs(store)
    with pytest.raises(StoreUnsafe, match=rf"/{refused}.*cannot be read: Permission denied\. Allow it\.$"):
        _ = leases(store), SnapshotCatalog(store).newest_good()
    assert SnapshotCatalog(store).set_aside_reasons() == {}


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


@pytest.fixture(scope="module")
def long_lived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of more lives than two leases name, each with a snapshot; the newest two are kept."""
    store, name = Store.open(tmp_path_factory.mktemp("runs") / "digits"), None
    for life in range(1, 2 * BLOCK + 4):
        writer = alone(store, name, keep=2)
        name = take(writer, life)[0].name
        writer.close()
    return Path(store.url)


@pytest.mark.parametrize("damage", [lambda path: flip(path, 0.5), lambda path: path.unlink()], ids=["damaged", "gone"])
@pytest.mark.parametrize("lost", [1, 2, *range(BLOCK - 1, BLOCK + 3), *range(2 * BLOCK - 1, 2 * BLOCK + 4)])
def test_any_one_lease_is_repaired_from_the_others(
    lost: int, damage: Callable[[Path], None], long_lived: Path, tmp_path: Path
):
    store = Store.open(shutil.copytree(long_lived, tmp_path / "digits"))
    lineage, newest_good, rows = Lineage.of(store), SnapshotCatalog(store).newest_good(), SnapshotCatalog(store).rows()
    damage(Path(store.url, f"lease/{lost:06d}.json"))
    (repair,) = repairs(store)
    assert f"rebuild it: generation {lost}, " in repair.message
    assert repair.act
    repair.act()
    assert repairs(store) == []
    assert Lineage.of(store) == lineage
    assert SnapshotCatalog(store).newest_good() == newest_good
    assert SnapshotCatalog(store).rows() == rows
    assert [lease.generation for lease in leases(store)] == [*range(1, 2 * BLOCK + 4)]


@pytest.mark.parametrize("damage", [lambda path: flip(path, 0.5), lambda path: path.unlink()], ids=["damaged", "gone"])
def test_a_lease_that_nothing_repeats_is_named_and_not_removed(
    damage: Callable[[Path], None], long_lived: Path, tmp_path: Path
):
    store = Store.open(shutil.copytree(long_lived, tmp_path / "digits"))
    for one in (2 * BLOCK, 2 * BLOCK + 1):
        damage(Path(store.url, f"lease/{one:06d}.json"))
    named = [repair for repair in repairs(store) if repair.act is None]
    assert [f"lease/{2 * BLOCK:06d}.json" in repair.message for repair in named] == [True]
    assert "start over under another run name" in named[0].message


def test_snapshots_of_another_run_say_nothing_of_a_lost_lease(store: Store, tmp_path: Path):
    other = Store.open(tmp_path / "other" / "digits")
    for life, name in enumerate([None, "000000000001-g000001", "000000000002-g000002"], 1):
        (foreign,) = take(alone(other, name), life)
    (own,) = take(alone(store), 1)
    take(alone(store, own.name), 4)
    Path(other.url, "snapshots", foreign.name).rename(Path(store.url, "snapshots", foreign.name))
    Path(store.url, "lease/000002.json").unlink()
    messages = [repair.message for repair in repairs(store)]
    assert [f"generation 2, resumed from {own.name}" in message for message in messages] == [True]


def test_all_leases_are_made_anew_from_the_manifests(store: Store):
    name = None
    for life in range(1, 4):
        name = take(alone(store, name), life)[0].name
    lineage, rows = Lineage.of(store), SnapshotCatalog(store).rows()
    for generation in range(1, 4):
        Path(store.url, f"lease/{generation:06d}.json").unlink()
    for repair in repairs(store):
        assert repair.act
        repair.act()
    assert (Lineage.of(store), SnapshotCatalog(store).rows()) == (lineage, rows)
    assert repairs(store) == []
