"""Stores: whole files, one who creates, passwords and refusals."""

import errno
import json
import os
import stat
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiobotocore.client import AioBaseClient
from botocore.exceptions import ClientError

from midstride.engine.errors import JobError, SnapshotDamaged, StoreFull, StoreUnsafe
from midstride.engine.snapshots.lease import leases
from midstride.engine.storage import store as storing
from midstride.engine.storage.checksums import decode_document, encode_document
from midstride.engine.storage.store import Store, StoreOptions
from midstride.engine.training.trainer import Trainer


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


#: how to find an empty store
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


@pytest.mark.parametrize(
    ("url", "folders", "said"),
    [
        ("file/runs", [], r"file/runs cannot be written: .*Name a folder.*snapshots\.url"),
        ("file", [], r"file cannot be written: .*Name a folder.*snapshots\.url"),
        (256 * "a", [], r"File name too long.*Give it a shorter name.*snapshots\.url"),
        ("link/runs", [], r"leads nowhere: '.*link'\. Mount the target of the link, or correct.*snapshots\.url"),
        ("", ["nothing", "folder", "file"], "file is a file where a folder is needed: move it away"),
    ],
)
def test_a_store_that_cannot_be_written_is_refused(url: str, folders: list[str], said: str, tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(StoreUnsafe, match=said):
        Store.open(tmp_path / url).ensure_writable(folders)
    assert names_in(tmp_path) == ["file", "folder", "link"]


def test_old_probes_of_killed_processes_are_removed(tmp_path: Path):
    old, new = (
        (f".probe-{'0' * 32}", f"..probe-{'0' * 32}.0.draft"),
        (f".probe-{'1' * 32}", f"..probe-{'1' * 32}.0.draft"),
    )
    for name in (*old, *new):
        (tmp_path / name).touch()
    for name in old:
        os.utime(tmp_path / name, (0, (tmp_path / name).stat().st_mtime - 3700))
    Store.open(tmp_path).ensure_writable()
    assert names_in(tmp_path) == sorted(new)


def test_a_disk_with_room_for_one_file_counts_as_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    room = [True, False]

    def fill(handle: int) -> None:
        if not room.pop(0):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", lambda handle: fill(handle) if stat.S_ISREG(os.fstat(handle).st_mode) else None)
    with pytest.raises(StoreFull, match="Free some space"):
        Store.open(tmp_path).ensure_writable()
    assert room == []
    assert names_in(tmp_path) == []


def test_stores_without_exclusive_creation_are_refused_by_name():
    with pytest.raises(StoreUnsafe, match=r"memory://.*snapshots\.url"):
        Store.open("memory://bucket/runs").ensure_writable()
    with pytest.raises(StoreUnsafe, match="nowhere://"):
        Store.open("nowhere://bucket/runs")


def test_any_store_is_allowed_for_a_single_writer():
    store = Store.open(f"memory://{uuid.uuid4().hex}/runs", StoreOptions(lease="none"))
    store.ensure_writable()
    assert store.at("a").create("b", b"1")
    assert not store.at("a").create("b", b"2")
    assert store.read("a/b") == b"1"


def test_a_url_with_a_password_is_refused_without_repeating_it():
    with pytest.raises(StoreUnsafe, match="holds a password, which would be stored") as refused:
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


#: what a server answers that the one of the tests does not -> (the error, words of the way out)
ANSWERED: dict[str, tuple[type[Exception], str]] = {
    "XMinioStorageFull": (StoreFull, "Free some space: the same command then resumes the run."),
    "XMinioAdminBucketQuotaExceeded": (StoreFull, "Free some space: the same command then resumes the run."),
    "QuotaExceeded": (StoreFull, "Free some space: the same command then resumes the run."),
    "ExpiredToken": (StoreUnsafe, "Renew AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN"),
    "RequestTimeTooSkewed": (StoreUnsafe, "Set the clock of this machine right"),
}


@pytest.mark.parametrize("code", ANSWERED)
def test_what_an_s3_server_refuses_is_said_with_its_way_out(
    code: str, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no room a retry may help; the words are the server's, once."""
    kind, way_out = ANSWERED[code]

    async def refuse(client: AioBaseClient, name: str, arguments: Any) -> Any:
        raise ClientError({"Error": {"Code": code, "Message": "It is so."}}, name)

    monkeypatch.setattr(AioBaseClient, "_make_api_call", refuse)
    with pytest.raises(kind) as caught:
        Store.open(f"{bucket}/a").ensure_writable()
    said = str(caught.value)
    assert said.startswith(f"{bucket}/a cannot be written: ")
    assert way_out in said
    assert said.count(code) == said.count("It is so") == 1
    assert said.count("[Errno") <= 1
    assert ".." not in said


OWN_STORES = """
from midstride.engine.storage.local import LocalStore


class Mine(LocalStore):
    def __init__(self, url, options=None):
        super().__init__(url.removeprefix("mine://"), options)


class Half(LocalStore.__mro__[1]):
    def read(self, path):
        return b""


number = 7
"""


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("own_stores:Mine", ""),
        (
            "own_stores:Half",
            "mine:// is the store own_stores:Half, which has no create, find, list, remove, size, stream",
        ),
        (
            "own_stores:number",
            "mine:// is own_stores:number, which is not a store: derive it from midstride.engine.Store",
        ),
        ("own_stores:None_", "mine:// is the store own_stores:None_, which cannot be imported: AttributeError("),
        ("no_such_stores:Mine", "mine:// is the store no_such_stores:Mine, which cannot be imported: ModuleNotFound"),
    ],
)
def test_a_store_of_an_installed_package_is_found_by_its_scheme(
    value: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packages" / "own_stores-1.dist-info"
    package.mkdir(parents=True)
    (package.parent / "own_stores.py").write_text(OWN_STORES)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: own-stores\nVersion: 1\n")
    (package / "entry_points.txt").write_text(f"[midstride.stores]\nmine = {value}\n")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "own_stores", raising=False)
    monkeypatch.setattr(storing, "_class_of", storing._class_of.__wrapped__)
    if words:
        with pytest.raises(StoreUnsafe) as caught:
            Store.open(f"mine://{tmp_path}/runs")
        assert str(caught.value).startswith(words)
        return
    store = Store.open(f"mine://{tmp_path}/runs")
    store.at("first").write("a", b"1")
    assert (tmp_path / "runs" / "first" / "a").read_bytes() == b"1"
