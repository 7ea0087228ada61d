"""A wrong value in a document of a run is named in an error, or the document does not count."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.snapshot_writers import alone, state_at

from midstride.engine.errors import EngineError, SnapshotDamaged, WorldError
from midstride.engine.loggers.delivery import read_run_json
from midstride.engine.runs.audit import audit
from midstride.engine.runs.run_report import report_at
from midstride.engine.runs.summary import summary_of
from midstride.engine.session.attempts import AttemptLog, fatal_snapshots
from midstride.engine.session.events import EventLog, EventTail
from midstride.engine.session.outcome import Outcome
from midstride.engine.session.session import Session
from midstride.engine.snapshots.catalog import Position, SnapshotCatalog
from midstride.engine.snapshots.inspection import inspect_run
from midstride.engine.snapshots.reader import read
from midstride.engine.snapshots.repair import repairs
from midstride.engine.snapshots.weights import best_to_show, folder_to_test
from midstride.engine.storage.checksums import encode_document
from midstride.engine.storage.store import Store

FACTS = {"identity": {}, "progress": {"step": 2, "epoch": 0, "finished": True}, "weights": {}, "weights_facts": {}}
#: what reads a run's folder
READERS: dict[str, Callable[[Store], object]] = {
    "verify": lambda store: [finding.as_json() for finding in inspect_run(store, read=True)],
    "repair": repairs,
    "report": report_at,
    "summary": lambda store: summary_of("run", store),
    "audit": lambda store: audit(store.url),
    "retry": lambda store: (AttemptLog(store).verdict(3), fatal_snapshots(AttemptLog(store).attempts())),
    "test": lambda store: (folder_to_test(store), best_to_show(store)),
    "resume": lambda store: SnapshotCatalog(store).newest_good(),
}
#: of a kind each, and one that is missing
MISSING = object()
VALUES = (MISSING, None, [], {}, "x", -1, 0.5, True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = Store.open(tmp_path_factory.mktemp("documents") / "run")
    writer = alone(store)
    for folder in ("best", "last"):
        facts = {"step": 2, "metrics": {"val/loss": 1.0}, "monitors": [{"monitor": "val/loss", "mode": "min"}]}
        writer.save_weights(folder, Position(2), {"w": torch.ones(2)}, facts)
    writer.flush_weights()
    state = {**state_at(2), "samples": {"stretches": [], "left_out": []}}
    writer.take(Position(2), state, "epoch,step\n0,1\n0,2\n", FACTS).future.result()
    attempts = AttemptLog(store)
    attempts.record(attempts.begin(), Outcome("died", "out of memory"))
    store.write("job.json", encode_document({"job": {}}))
    store.write("run.json", b"{}")
    store.write("report.json", b"{}")
    assert writer.close(10.0)
    return Path(store.url)


def changed(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the document with each of its values, and each in its values, replaced by each of `VALUES`."""
    for key, value in document.items():
        for other in VALUES:
            if key != "checksum":
                yield {name: one for name, one in {**document, key: other}.items() if one is not MISSING}
        if isinstance(value, dict):
            yield from ({**document, key: inner} for inner in changed(value))


DOCUMENTS = ["snapshots/*/manifest.json", "best/*/manifest.json", "lease/*", "attempts/*", "job.json"]


@pytest.mark.parametrize("pattern", DOCUMENTS)
def test_a_wrong_value_is_an_error_of_the_engine(pattern: str, run: Path, tmp_path: Path) -> None:
    (file,) = run.glob(pattern)
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    path, right, refused = folder / file.relative_to(run), json.loads(file.read_text()), 0
    for wrong in changed(right):
        sealed = wrong.pop("checksum", None) is not None
        for reader in READERS.values():
            path.write_bytes(encode_document(wrong) if sealed else json.dumps(wrong).encode())
            try:
                reader(Store.open(folder))
            except EngineError:
                refused += 1
            for marker in folder.rglob("aside.json"):
                marker.unlink()
    assert refused or pattern in ("attempts/*", "job.json"), "these do not count then, with a warning"


#: what stands in place of a whole document
WHOLE = (b"", b"[]", b"1", b"null", b'"x"', b'{"a":', b"[" * 100_000, b"\xff\xfe", b'[{"number": 1}]', b"{}")


@pytest.mark.parametrize("pattern", [*DOCUMENTS, "snapshots/*/rank-*.json", "run.json", "report.json"])
def test_a_document_of_another_kind_is_an_error_of_the_engine(pattern: str, run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    said = []
    for file in folder.glob(pattern):
        for wrong in WHOLE:
            for reader in (*READERS.values(), read_run_json, _told):
                file.write_bytes(wrong)
                try:
                    reader(Store.open(folder))
                except EngineError as error:
                    said.append((str(error), file))
                for marker in folder.rglob("aside.json"):
                    marker.unlink()

    names = [(words, {file.name, file.parent.name, f"{folder} has no snapshot"}) for words, file in said]
    assert [words for words, named in names if not any(name in words for name in named)] == []


def _told(store: Store) -> None:
    """Follow what a snapshot that was set aside says of it."""
    catalog = SnapshotCatalog(store)
    catalog.set_aside_reasons()
    for snapshot in catalog.snapshots():
        read(store, snapshot, 0)


@pytest.mark.parametrize("wrong", WHOLE)
def test_a_mark_of_another_kind_says_so(wrong: bytes, run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    (name,) = [path.name for path in folder.glob("snapshots/*")]
    (folder / "snapshots" / name / "aside.json").write_bytes(wrong)
    assert "aside.json does not say why" in SnapshotCatalog(Store.open(folder)).set_aside_reasons()[name]


#: what reads a file of a session
SESSION: dict[str, Callable[[Session], object]] = {
    "job.json": Session.document,
    "outcome-rank-00000.json": Session.outcomes,
    "unrecorded.json": Session.unrecorded,
    "ranks": lambda session: session.ranks,
}


@pytest.mark.parametrize("name", SESSION)
def test_a_wrong_file_of_a_session_is_named(name: str, tmp_path: Path) -> None:
    session = Session(tmp_path)
    assert SESSION[name](session) in (None, []) if name != "job.json" else True
    for wrong in (*WHOLE, b"-1", b"9" * 5000):
        (tmp_path / name).write_bytes(wrong)
        if (name, wrong) == ("ranks", b"1"):
            continue
        with pytest.raises(WorldError, match=name):
            SESSION[name](session)


def test_an_event_that_is_cut_off_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("step", step=1)
    with log.path.open("ab") as file:
        file.write(b"".join(wrong[:100] + b"\n" for wrong in WHOLE))
    log.emit("step", step=2)
    assert [event.fields["step"] for event in EventTail(log.path).new()] == [1, 2]
    assert caplog.text.count("an event is left out") == len(WHOLE) - 1  # an empty line is none


def test_the_key_its_value_and_the_right_type_are_named(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    (manifest,) = folder.glob("snapshots/*/manifest.json")
    document = json.loads(manifest.read_text())
    del document["checksum"]
    manifest.write_bytes(encode_document({**document, "facts": ["a"]}))
    words = r"manifest\.json has unexpected content: facts is \['a'\] instead of an object"
    with pytest.raises(SnapshotDamaged, match=words):
        SnapshotCatalog(Store.open(folder)).get(manifest.parent.name)
