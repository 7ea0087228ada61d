"""The folder of a run as a fit finds it: what is in the place of something else, and whose fault an error is."""

import errno
from pathlib import Path
from typing import Any

import pytest
from support.refused import Module, Numbers, fit
from torch.utils.data import DataLoader

from midstride.engine.errors import EngineError, SnapshotError, StoreSilent, StoreUnsafe, UserError
from midstride.engine.snapshots.catalog import RUN_FILES, RUN_FOLDERS, SnapshotCatalog
from midstride.engine.training.trainer import Trainer


@pytest.mark.parametrize("folder", RUN_FOLDERS)
def test_a_file_for_a_folder_of_a_run_is_refused(folder: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fit(run)
    (run / folder).mkdir(exist_ok=True)
    (run / folder).rename(tmp_path / "kept")
    (run / folder).touch()
    before = sorted(run.rglob("*"))
    with pytest.raises(StoreUnsafe, match=f"run/{folder} is a file where a folder is needed: move it away"):
        fit(run)
    assert sorted(run.rglob("*")) == before
    (run / folder).unlink()
    (tmp_path / "kept").rename(run / folder)
    fit(run)


@pytest.mark.parametrize("file", RUN_FILES)
def test_a_folder_for_a_file_of_a_run_is_refused(file: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fit(run)
    (run / file).unlink(missing_ok=True)
    (run / file / "kept").mkdir(parents=True)
    before = sorted(run.rglob("*"))
    with pytest.raises(StoreUnsafe, match=f"run/{file} is a folder where a file is needed: move it away"):
        fit(run)
    assert sorted(run.rglob("*")) == before
    (run / file / "kept").rmdir()
    fit(run, max_epochs=2)
    assert (run / file).is_file() == (file != "job.json"), "an empty folder is replaced, where the file is written"


def test_a_finished_run_that_lost_rows_keeps_its_metrics_csv(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    fit(run, max_epochs=4, snapshots={"every_steps": 1, "keep": 1})
    complete = (run / "metrics.csv").read_bytes()
    segment = sorted((run / "metrics").glob("*.csv"))[1]
    segment.write_bytes(b"")
    fit(run, max_epochs=4, snapshots={"every_steps": 1, "keep": 1})
    assert f"{segment} has checksum" in caplog.text
    assert (run / "metrics.csv").read_bytes() == complete
    (run / "metrics.csv").unlink()
    fit(run, max_epochs=4, snapshots={"every_steps": 1, "keep": 1})
    assert len((run / "metrics.csv").read_bytes().splitlines()) == len(complete.splitlines()) - 1


#: what choosing a snapshot ends with -> the class of the error of the fit, and its words
CHOICES: list[tuple[Exception, type[EngineError], str]] = [
    (
        TypeError("no int"),
        EngineError,
        r"a bug in midstride itself, not damage in \S+/run, is in the log: TypeError: no int",
    ),
    (
        KeyError("step"),
        EngineError,
        r"a bug in midstride itself, not damage in \S+/run, is in the log: KeyError: 'step'",
    ),
    (TimeoutError("no answer"), StoreSilent, r"/run: TimeoutError: no answer"),
    (OSError(errno.EIO, "Broken"), SnapshotError, r"/run: OSError: \[Errno 5\] Broken"),
    (RuntimeError("of a library"), SnapshotError, r"/run: RuntimeError: of a library"),
]


@pytest.mark.parametrize(("error", "kind", "said"), CHOICES)
def test_a_fault_of_the_code_is_not_said_to_be_the_stores(
    error: Exception, kind: type[EngineError], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(catalog: SnapshotCatalog, verify: object) -> None:
        raise error

    monkeypatch.setattr(SnapshotCatalog, "newest_good", fail)
    with pytest.raises(kind, match=said) as caught:
        fit(tmp_path / "run")
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ("", "run='': name the folder or URL of a run"),
        (7, "run=7: name the folder or URL of a run"),
        ("s3:/bucket/first", "run: s3:/bucket/first is a folder called s3: here; a URL has two slashes: s3://"),
        ("s3://", "run: s3:// names no folder"),
    ],
)
def test_a_run_that_names_no_folder_is_refused(
    run: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        Trainer(max_epochs=1).fit(Module(), DataLoader(Numbers(), 2), run=run)
    assert not [*tmp_path.iterdir()]
