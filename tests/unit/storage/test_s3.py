"""S3 as it is: files in parts, answers that get lost, servers that go away, and what a person then reads."""

import logging
import os
import random
import re
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiobotocore.client import AioBaseClient
from laws.lives import Setting, Tangled
from support.flow_runs import wait_for
from support.proxy import Proxy
from support.seaweed import KEY, SECRET, Seaweed
from support.snapshot_writers import take
from unit.cli.test_app import JOB, MODEL, run

from midstride.engine.errors import SnapshotError, StoreSilent, Superseded
from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.snapshots.lease import acquire, leases
from midstride.engine.snapshots.position import Position
from midstride.engine.snapshots.reader import load_weights
from midstride.engine.snapshots.writer import PendingSnapshot, Writer
from midstride.engine.storage.store import Store, StoreOptions
from midstride.engine.world import World

MIB = 2**20


def bucket_of(url: str) -> str:
    return url.removeprefix("s3://").partition("/")[0]


def pending(server: Seaweed, url: str) -> list[str]:
    """Return the keys of the uploads in parts that were begun and neither completed nor aborted."""
    return [upload["Key"] for upload in server.call("list_multipart_uploads", Bucket=bucket_of(url)).get("Uploads", [])]


def asked(patch: pytest.MonkeyPatch, answer: Callable[[list[str]], None] = lambda names: None) -> list[str]:
    """Return the names of requests, as they come; `answer` gets them before each is made, and may raise."""
    names: list[str] = []
    ask = AioBaseClient._make_api_call

    async def named(client: AioBaseClient, name: str, arguments: Any) -> Any:
        names.append(name)
        answer(names)
        return await ask(client, name, arguments)

    patch.setattr(AioBaseClient, "_make_api_call", named)
    return names


# --- files in parts -------------------------------------------------------------------------------------------------


def test_a_large_file_goes_in_parts_and_little_memory(s3: Seaweed, bucket: str) -> None:
    store = Store.open(f"{bucket}/run")
    data = bytearray(os.urandom(MIB)) * 128
    store.write("warm", b"up")
    tracemalloc.start()
    try:
        store.write("large", memoryview(data))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 80 * MIB
    assert s3.call("head_object", Bucket=bucket_of(bucket), Key="run/large")["ETag"].strip('"').endswith("-16")
    assert b"".join(store.stream("large")) == data
    assert pending(s3, bucket) == []


def test_what_an_interrupted_upload_leaves_is_swept(s3: Seaweed, bucket: str) -> None:
    store = Store.open(f"{bucket}/run")
    dead = "snapshots/000000000001-g000001"
    for key in (f"run/{dead}/rank", "run/snapshots/000000000001-g000001x/rank", "another/rank"):
        s3.call("create_multipart_upload", Bucket=bucket_of(bucket), Key=key)
    assert list(store.unfinished("snapshots")) == ["000000000001-g000001", "000000000001-g000001x"]
    assert store.list("snapshots") == []
    store.remove(dead)
    assert sorted(pending(s3, bucket)) == ["another/rank", "run/snapshots/000000000001-g000001x/rank"]


@pytest.mark.parametrize("operation", ["UploadPart", "CompleteMultipartUpload"])
def test_a_failed_upload_is_aborted(operation: str, s3: Seaweed, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(names: list[str]) -> None:
        if names[-1] == operation:
            raise PermissionError("no")

    names = asked(monkeypatch, refuse)
    with pytest.raises(PermissionError):
        Store.open(f"{bucket}/run").write("large", bytes(20 * MIB))
    assert operation in names
    assert pending(s3, bucket) == []
    assert s3.keys(bucket) == []


def test_a_chunk_that_is_not_answered_is_asked_for_anew(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, data = Store.open(f"{bucket}/run"), os.urandom(40 * MIB + 1)
    store.write("large", data)

    def fail_the_third(names: list[str]) -> None:
        if names[-1] == "GetObject" and names.count("GetObject") == 3:
            raise ConnectionError("reset")

    names = asked(monkeypatch, fail_the_third)
    assert b"".join(store.stream("large")) == data
    assert names.count("GetObject") > 6


# --- one writer -----------------------------------------------------------------------------------------------------


def test_a_lease_whose_answer_was_lost_is_taken_once(s3: Seaweed, bucket: str) -> None:
    with Proxy(s3.port, lose=1, marked=b"200 OK") as proxy, s3.reached(AWS_ENDPOINT_URL=proxy.endpoint):
        store = Store.open(f"{bucket}/run")
        assert store.create("file", b"mine")
        assert proxy.lost == 1
        proxy.lose = 2
        assert not store.create("file", b"another's")
    with s3.reached():
        assert Store.open(f"{bucket}/run").read("file") == b"mine"


@pytest.mark.parametrize("before", [None, b"before"])
def test_a_late_request_of_a_superseded_world_is_refused(before: bytes | None, bucket: str) -> None:
    older, newer = Store.open(f"{bucket}/run"), Store.open(f"{bucket}/run")
    if before is not None:
        older.write("metrics.csv", before)
    asked = 0

    def check() -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            raise Superseded("a newer generation advances the run")
        newer.write("metrics.csv", b"newer", check=lambda: None)  # the request that follows is on its way that long

    with pytest.raises(Superseded):
        older.write("metrics.csv", b"older", check=check)
    assert (asked, newer.read("metrics.csv")) == (2, b"newer")


def test_sixteen_threads_create_once(bucket: str) -> None:
    gate, won = threading.Barrier(16), []

    def race(who: int) -> None:
        store = Store.open(f"{bucket}/run")
        gate.wait()
        if store.create("lease/1", b"%d" % who):
            won.append(who)

    racers = [threading.Thread(target=race, args=(who,)) for who in range(16)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert len(won) == 1
    assert Store.open(f"{bucket}/run").read("lease/1") == b"%d" % won[0]


def test_a_store_without_a_lease_is_written_all_the_same(s3: Seaweed, bucket: str) -> None:
    store = Store.open(f"{bucket}/run", StoreOptions(lease="none"))
    store.ensure_writable()
    assert [acquire(store, None, {}).generation for _ in range(2)] == [1, 2]
    assert [lease.generation for lease in leases(store)] == [1, 2]


# --- patience -------------------------------------------------------------------------------------------------------


def test_a_server_that_goes_away_and_comes_back_loses_nothing(
    own_s3: Seaweed, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store.open(f"{own_s3.bucket()}/run", StoreOptions(patience_s=60.0))
    store.write("before", b"1")
    draws = random.getstate()
    own_s3.kill()
    writer = threading.Thread(target=store.write, args=("large", bytes(20 * MIB)))
    writer.start()
    wait_for(lambda: "does not answer" in caplog.text, "the writer to miss the server")
    own_s3.start()
    writer.join()
    assert store.read("before") == b"1"
    assert b"".join(store.stream("large")) == bytes(20 * MIB)
    assert random.getstate() == draws, "who waits must not draw from the generators of the training"
    assert re.search(rf"{store.url} does not answer, waiting up to 60 s: .*: Connect call failed", caplog.text)
    assert re.search(rf"{store.url} answers again after \d+ s", caplog.text)


def test_a_dropped_snapshot_passes_its_rows_to_the_next(own_s3: Seaweed, caplog: pytest.LogCaptureFixture) -> None:
    store = Store.open(f"{own_s3.bucket()}/run", StoreOptions(patience_s=0.5))
    writer = Writer(store, acquire(store, None, {}), World(), lambda value: [value], "run", 100)

    def take(step: int) -> PendingSnapshot:
        return writer.take(Position(step), {"progress": {"step": step}}, f"step\n{step}\n", {})

    take(1).future.result()
    own_s3.kill()
    dropped = take(2)
    with pytest.raises(StoreSilent, match="snapshot 000000000002-g000001 was not taken, rank 0 says: ConnectionError"):
        dropped.future.result()
    with pytest.raises(StoreSilent):
        writer.flush()
    writer.check()  # training goes on
    own_s3.start()
    # As if only the answer to its manifest had been lost: it must not be read beside the next, which has its rows.
    store.write("snapshots/000000000002-g000001/manifest.json", b"{}")
    take(3).future.result()
    take(4).future.result()
    writer.flush()
    assert writer.close()
    assert [snapshot.position.step for snapshot in SnapshotCatalog(store).snapshots()] == [1, 3, 4]
    assert store.list("snapshots/000000000002-g000001") == []
    assert SnapshotCatalog(store).rows() == ["step\n1\n", "step\n2\n3\n", "step\n4\n"]
    assert "It is dropped and training continues; a failure now loses the steps since snapshot" in caplog.text


class Leaving(Tangled):
    """Its server goes away when its training is over."""

    def on_train_end(self) -> None:
        for server in LEAVING:
            server.kill()


LEAVING: list[Seaweed] = []


def test_a_silent_store_at_the_end_is_named_and_nothing_lost(own_s3: Seaweed) -> None:
    run = f"{own_s3.bucket()}/run"
    LEAVING[:] = [own_s3]
    options = {"snapshots": {"every_steps": 4, "store_patience_s": 0.5}, "max_epochs": 1}
    with pytest.raises(StoreSilent) as caught:
        Setting(options=options, module=Leaving).train(run)
    assert caught.value.exit_code == 1
    words = "The training is over, after step 6, but its end could not be written: the run resumes from snapshot"
    assert words in str(caught.value)
    own_s3.start()
    LEAVING.clear()
    Setting(options=options, module=Leaving).train(run)
    store = Store.open(run)
    assert load_weights(store, "last").facts["step"] == 6
    assert store.read("metrics.csv").count(b"\n") >= 6


def test_a_snapshot_takes_a_dozen_requests(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the writer of a generation has committed, it does not ask the store for again: its lease is all it reads."""
    store = Store.open(f"{bucket}/run")
    writer = Writer(store, acquire(store, None, {}), World(), lambda value: [value], "run", 2)
    take(writer, 1, 2, 3)
    with monkeypatch.context() as patch:
        names = asked(patch)
        take(writer, *range(4, 8))
    assert writer.close()
    assert len(names) == 4 * 11, names
    assert names.count("GetObject") == 4
    assert [snapshot.position.step for snapshot in SnapshotCatalog(store).snapshots()] == [6, 7]
    assert len(SnapshotCatalog(store).rows()) == 7


def test_patience_ends(own_s3: Seaweed) -> None:
    store = Store.open(f"{own_s3.bucket()}/run", StoreOptions(patience_s=1.0))
    own_s3.kill()
    with pytest.raises(ConnectionError, match=r"http://127.0.0.1:\d+: Connect call failed"):
        store.write("file", b"1")
    with pytest.raises(SnapshotError, match=r"does not answer: http://127.0.0.1:"):
        store.ensure_writable()


# --- what a person reads --------------------------------------------------------------------------------------------

#: what is wrong -> (what is changed, what is said of it, and what to do)
WRONG: dict[str, tuple[dict[str, str], str]] = {
    "no such bucket": ({}, "NoSuchBucket: the bucket does not exist. Create the bucket"),
    "wrong secret": (
        {"AWS_SECRET_ACCESS_KEY": "wrong"},
        "SignatureDoesNotMatch: The request signature we calculated does not match the signature you provided. "
        "Check your key and signing method. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    ),
    "wrong key": (
        {"AWS_ACCESS_KEY_ID": "who"},
        "InvalidAccessKeyId: The access key ID you provided does not exist in our records. "
        "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    ),
    "no such profile": (
        {"AWS_PROFILE": "gone"},
        "The config profile (gone) could not be found. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    ),
    "no such host": (
        {"AWS_ENDPOINT_URL": "http://no-such-host.invalid:9000"},
        "there is no host no-such-host.invalid. Set AWS_ENDPOINT_URL to where the server is",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_with_s3_is_said_before_training(
    wrong: str, s3: Seaweed, bucket: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changes, words = WRONG[wrong]
    url = "s3://no-such-bucket/runs" if wrong == "no such bucket" else f"{bucket}/runs"
    (tmp_path / "cli_model.py").write_text(MODEL)
    (tmp_path / "job.yaml").write_text(JOB)
    with s3.reached(**changes):
        assert run("fit", f"{tmp_path}/job.yaml", "--run", "a", "--set", f"snapshots.url={url}") == 2
    shown = capfd.readouterr()
    assert shown.out == f"run a in {url}/a\n"
    assert shown.err.splitlines() == [
        "1 fault in job tiny:",
        f"  snapshots.url: {url}/a cannot be written: {words}, "
        "or choose another place: snapshots.url of a job, run= of a script.",
    ]


@pytest.mark.usefixtures("forked_worlds")
def test_no_secret_is_written_down(
    s3: Seaweed, bucket: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "cli_model.py").write_text(MODEL)
    (tmp_path / "job.yaml").write_text(JOB)
    url = f"{bucket}/runs"
    assert run("fit", f"{tmp_path}/job.yaml", "--run", "a", "--set", f"snapshots.url={url}") == 0
    assert run("snapshots", "verify", url) == 0
    shown = capfd.readouterr()
    written = {key: Store.open(bucket).read(key) for key in s3.keys(bucket)}
    assert "runs/a/run.json" in written
    assert "runs/a/attempts/000001.log" in written
    for secret in (KEY, SECRET):
        assert secret not in shown.out + shown.err + caplog.text
        assert not [key for key, data in written.items() if secret.encode() in data]
    assert SnapshotCatalog(Store.open(f"{url}/a")).newest_good() is not None
