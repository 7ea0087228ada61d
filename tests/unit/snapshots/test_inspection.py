"""What `midstride snapshots` shows: everything that lies in a run, and what is wrong with it."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.seaweed import Seaweed
from support.snapshot_files import flip
from support.snapshot_writers import alone, save_weights, take
from unit.cli.test_app import run

from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.snapshots.inspection import inspect_run
from midstride.engine.snapshots.lease import Lease, acquire, lease_document
from midstride.engine.snapshots.position import Position
from midstride.engine.storage.checksums import encode_document
from midstride.engine.storage.store import Store

NAMES = [f"{step:012d}-g000001" for step in (1, 2, 3)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with three snapshots, the first of them pruned to its metric rows and taken again, and weights."""
    store = Store.open(tmp_path / "runs" / "digits")
    writer = alone(store)
    take(writer, 0)
    SnapshotCatalog(store).prune(1)
    take(writer, 1, 2, 3)
    SnapshotCatalog(store).prune(3)
    save_weights(store, "best", {"loss": 1.0}, {})
    return Path(store.url)


def states(folder: Path, *, read: bool = True) -> dict[str, str]:
    return {finding.name: finding.state for finding in inspect_run(Store.open(folder), read=read)}


def test_what_is_whole_is_verified(folder: Path) -> None:
    assert states(folder) == dict.fromkeys(NAMES, "verified")
    assert states(folder, read=False) == dict.fromkeys(NAMES, "committed")
    assert not [finding for finding in inspect_run(Store.open(folder), read=True) if not finding.is_good]


#: file of the run -> what is found damaged
FILES = {
    f"snapshots/{NAMES[1]}/rank-00000-of-00001.safetensors": [NAMES[1]],
    f"snapshots/{NAMES[1]}/rank-00000-of-00001.json": [NAMES[1]],
    f"snapshots/{NAMES[1]}/metrics.csv": [NAMES[1], "metrics"],
    f"snapshots/{NAMES[1]}/manifest.json": [NAMES[1], "metrics"],
    "metrics/*.csv": ["metrics"],
    "best/*/*.safetensors": ["best"],
    "best/*/manifest.json": ["best"],
    "lease/000001.json": ["lease"],
}


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_anywhere_is_found(file: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = folder.glob(file)
    flip(path, 0.5)
    assert run("snapshots", "verify", str(folder)) == 1
    assert path.name in capsys.readouterr().out
    assert [name for name, state in states(folder).items() if state == "damaged"] == FILES[file]


def test_what_does_not_count_is_shown_and_is_no_fault(folder: Path) -> None:
    store = Store.open(folder)
    stale = alone(store, NAMES[0])
    acquire(store, NAMES[0], {})
    with pytest.raises(Exception, match="has taken over"):
        take(stale, 4)
    store.write("snapshots/000000000004-g000002/metrics.csv", b"")  # as a world leaves it that is killed there
    newer = alone(store, NAMES[0])
    take(newer, 2)
    (folder / "snapshots" / "000000000002-g000004" / "manifest.json").unlink()
    SnapshotCatalog(store).set_aside(NAMES[0], "a test said so")
    assert states(folder) == {
        NAMES[0]: "set aside",
        NAMES[1]: "superseded",
        "000000000002-g000004": "not committed",
        NAMES[2]: "superseded",
        "000000000004-g000002": "superseded",
    }
    assert run("snapshots", "verify", str(folder)) == 0


def test_programs_get_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(folder / "snapshots" / NAMES[1] / "manifest.json", 0.5)
    assert run("snapshots", "verify", str(folder.parent), "--json") == 1
    found = json.loads(capsys.readouterr().out)["digits"]
    assert [one["state"] for one in found] == ["verified", "damaged", "verified", "damaged"]
    assert found[0] | {"time": 0, "bytes": 0} == {
        **{"name": NAMES[0], "state": "verified", "reason": "", "step": 1, "generation": 1},
        **{"bytes": 0, "time": 0},
    }
    assert run("snapshots", "list", str(folder), "--json") == 0
    assert len(json.loads(capsys.readouterr().out)[str(folder)]) == 3


def test_prune_keeps_what_is_asked_and_what_was_resumed_from(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    take(alone(Store.open(folder), NAMES[1]), 5, 6, 7)
    assert run("snapshots", "prune", str(folder), "--keep", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out)[str(folder)] == {
        "removed": [NAMES[0], "000000000005-g000002", "000000000006-g000002"],
        "kept": [NAMES[1], "000000000007-g000002"],
    }
    assert run("snapshots", "verify", str(folder)) == 0
    assert SnapshotCatalog(Store.open(folder)).rows() == [f"{step},row\n" for step in (0, 1, 2, 5, 6, 7)]


def test_the_commands_take_any_url(s3: Seaweed, bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.open(f"{bucket}/runs/digits")
    (good,) = take(alone(store), 1)
    s3.call("create_multipart_upload", Bucket=bucket[5:], Key="runs/digits/snapshots/000000000002-g000001/rank")
    assert run("snapshots", "verify", f"{bucket}/runs") == 0
    shown = capsys.readouterr().out
    assert "verified" in shown
    assert "not committed" in shown
    store.write(f"snapshots/{good.name}/metrics.csv", b"0,row\n")
    assert run("snapshots", "verify", f"{bucket}/runs") == 1
    assert run("snapshots", "prune", f"{bucket}/runs", "--keep", "1") == 0


def test_who_may_not_read_is_told_why(s3: Seaweed, bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    with s3.reached(AWS_ACCESS_KEY_ID="who"):
        assert run("snapshots", "list", f"{bucket}/runs") == 2
    assert capsys.readouterr().err == (
        f"{bucket}/runs cannot be read: InvalidAccessKeyId: The access key ID you provided does not exist in our "
        "records. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE.\n"
    )


# --- repair ---------------------------------------------------------------------------------------------------------

#: what is gone or damaged -> what is said of it before it is mended
REPAIRED = {
    "lease/000002.json": "rebuild it: generation 2, resumed from 000000000003-g000001",
    "lease/000001.json": "rebuild it: generation 1, a fresh start",
    "snapshots/000000000005-g000002/rank-00000-of-00001.json": "set snapshot 000000000005-g000002 aside",
    "best/*/manifest.json": "set it aside: older weights count",
}


@pytest.mark.parametrize("how", ["flipped", "gone", "a folder"])
@pytest.mark.parametrize("file", REPAIRED)
def test_what_can_be_made_anew_is_said_and_done(
    file: str, how: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.open(folder)
    take(alone(store, NAMES[2]), 4, 5)
    newest, before = SnapshotCatalog(store).snapshots()[-1], SnapshotCatalog(store).snapshots()[-2]
    (path,) = folder.glob(file)
    if how == "flipped":
        flip(path, 0.5)
    else:
        path.unlink()
        if how == "a folder":
            path.mkdir()
    assert run("snapshots", "repair", str(folder)) == (0 if (file[:4], how) == ("best", "gone") else 1)
    assert (REPAIRED[file] in capsys.readouterr().out) == ((file[:4], how) != ("best", "gone"))
    assert run("snapshots", "repair", str(folder), "--yes") == 0
    capsys.readouterr()
    assert run("snapshots", "repair", str(folder)) == 0
    assert "nothing is damaged" in capsys.readouterr().out
    assert run("snapshots", "verify", str(folder)) == 0
    assert SnapshotCatalog(store).newest_good() == (before if file.startswith("snapshots") else newest)


def test_steps_without_rows_are_found(folder: Path) -> None:
    store = Store.open(folder)
    writer = alone(store, NAMES[2])
    for step in (4, 5, 6):
        writer.take(Position(step), {}, f"epoch,step\n0,{step - 1}\n", {})
    writer.flush()
    for name in NAMES:
        store.remove(f"snapshots/{name}")
    store.remove("metrics")
    store.remove("snapshots/000000000005-g000002")
    reasons = [finding.reason for finding in inspect_run(store, read=True) if not finding.is_good]
    assert reasons == ["the metric log has no rows of steps 1 to 2, 4"]
    assert run("snapshots", "verify", str(folder)) == 1


# --- what others may have put there -----------------------------------------------------------------------------------


def of_generation(generation: int) -> bytes:
    return lease_document(Lease(generation, None, "run"), {})


#: what lies in the folder of a run
STRANGE: dict[str, Callable[[Path], object]] = {
    "a lease of a huge number": lambda folder: (folder / "lease" / f"{10**17}.json").write_bytes(b"{}"),
    "a number that no lease has": lambda folder: (folder / "lease" / f"{'9' * 200}.json").write_bytes(b"{}"),
    "a digit that is none": lambda folder: (folder / "lease" / "00000².json").write_bytes(b"{}"),
    "20,000 leases": lambda folder: [
        (folder / "lease" / f"{number:06d}.json").write_bytes(b"{}" if number % 2 else of_generation(number))
        for number in range(2, 20_002)
    ],
    "a manifest of a huge generation": lambda folder: (folder / "snapshots" / NAMES[0] / "manifest.json").write_bytes(
        encode_document({"generation": 10**17, "run_id": "x", "ancestors": [1]})
    ),
    "a FIFO for metrics.csv": lambda folder: os.mkfifo(folder / "metrics.csv"),
    "a FIFO for a lease": lambda folder: os.mkfifo(folder / "lease" / "000002.json"),
    "a FIFO for an attempt": lambda folder: os.mkfifo(folder / "attempts" / "000001.json"),
    "a FIFO for a manifest": lambda folder: swapped(folder / "snapshots" / NAMES[2] / "manifest.json", os.mkfifo),
    "a FIFO for a snapshot": lambda folder: os.mkfifo(folder / "snapshots" / "000000000009-g000001"),
    "a FIFO for weights": lambda folder: swapped(next(folder.glob("best/*/*.safetensors")), os.mkfifo),
}


def swapped(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


@pytest.mark.parametrize("what", STRANGE)
def test_repair_ends_whatever_lies_in_a_run(what: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "attempts").mkdir()
    STRANGE[what](folder)
    for arguments in (("repair",), ("repair", "--yes"), ("verify",), ("list",)):
        assert run("snapshots", arguments[0], str(folder), *arguments[1:]) in (0, 1, 2)
    assert run("report", str(folder)) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


def test_repair_writes_nothing_through_a_link(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = tmp_path / "elsewhere"
    (folder / "snapshots" / NAMES[2]).rename(elsewhere)
    (folder / "snapshots" / NAMES[2]).symlink_to(elsewhere)
    (elsewhere / "metrics.csv").write_text("changed")
    before = {path: path.read_bytes() for path in elsewhere.iterdir()}
    assert run("snapshots", "repair", str(folder), "--yes") == 1
    assert "its folder is a link, which is not followed" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in elsewhere.iterdir()} == before


def test_names_are_shown_without_their_control_characters(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.rename(folder.parent / "a\x1b[2J\x9bb")
    for command in (["runs"], ["snapshots", "list"], ["snapshots", "verify"], ["snapshots", "repair"]):
        assert run(*command, str(folder.parent)) in (0, 1)
        out, err = capsys.readouterr()
        assert "\x1b" not in out + err
        assert "\x9b" not in out + err
