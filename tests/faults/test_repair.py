"""What `midstride snapshots repair` makes anew of the weights of a finished run, and what it says where it cannot."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from laws.lives import Setting, live
from laws.piped import Piped
from unit.cli.test_app import run as command

from midstride.engine.snapshots.catalog import SnapshotCatalog
from midstride.engine.snapshots.reader import load_weights
from midstride.engine.state.differences import differences
from midstride.engine.storage.store import Store

#: how a run was trained -> its setting; at the last step the weights are the best so far
SETTINGS = {
    "alone": Setting(),
    "ddp": Setting(ranks=2),
    "sharded": Setting(ranks=3, options={"strategy": "sharded"}),
    "pipeline": Setting(ranks=3, module=Piped, options={"strategy": "pipeline"}),
    "pipelines": Setting(ranks=4, module=Piped, options={"strategy": "pipeline", "strategy_args": {"balance": [6, 3]}}),
}


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a run that is finished."""
    done: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in done:
            top = tmp_path_factory.mktemp("finished")
            assert set(live(SETTINGS[name], top)) == {0}
            done[name] = top / "run"
        return done[name]

    return folder


@dataclass(frozen=True)
class Case:
    """What is done to the weights of a finished run, and what `repair` does about it.

    Args:
        folder: "best" or "last".
        gone: patterns of files that are removed.
        changed: patterns of files of which a byte is changed.
        words: what is said.
        rebuilt: whether the weights have their bits, metrics and facts again.
        setting: how the run was trained.
    """

    folder: str
    gone: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    words: str = "from snapshot"
    rebuilt: bool = True
    setting: str = "alone"


CASES = {
    "last, all gone": Case("last", gone=("*/*",)),
    "last, manifest gone": Case("last", gone=("*/manifest.json",)),
    "last, tensors gone": Case("last", gone=("*/*.safetensors",)),
    "last, manifest changed": Case("last", changed=("*/manifest.json",)),
    "last, tensors changed": Case("last", changed=("*/*.safetensors",)),
    "last, layouts changed": Case("last", changed=("*/model.json",)),
    "last, both changed": Case("last", changed=("*/*",)),
    "last of two ranks": Case("last", gone=("*/*",), setting="ddp"),
    "last of shards": Case("last", gone=("*/*",), setting="sharded"),
    "last of shards, manifest gone": Case("last", gone=("*/manifest.json",), setting="sharded"),
    "last of stages": Case("last", gone=("*/*",), setting="pipeline"),
    "last of stages, tensors changed": Case("last", changed=("*/*.safetensors",), setting="pipeline"),
    "last of two pipelines": Case("last", gone=("*/*",), setting="pipelines"),
    "best of stages": Case("best", changed=("*/*.safetensors",), setting="pipeline"),
    "best, manifest gone": Case("best", gone=("*/manifest.json",)),
    "best, tensors gone": Case("best", gone=("*/*.safetensors",)),
    "best, manifest changed": Case("best", changed=("*/manifest.json",)),
    "best, tensors changed": Case("best", changed=("*/*.safetensors",)),
    "best, all gone": Case("best", gone=("*/*",), words="nothing is left of them", rebuilt=False),
    "best of an older step": Case(
        "best", gone=("*00000012.*/*",), changed=("*/*.safetensors",), words="is of another state", rebuilt=False
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_weights_are_repaired_from_the_newest_snapshot(
    case: Case, finished: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = tmp_path / "run"
    shutil.copytree(finished(case.setting), url)
    store = Store.open(url)
    before = load_weights(store, case.folder)
    struck = [path for pattern in case.gone for path in (url / case.folder).glob(pattern)]
    for path in struck:
        path.unlink()
    changed = [path for pattern in case.changed for path in (url / case.folder).glob(pattern)]
    assert struck or changed
    for path in changed:
        path.write_bytes(path.read_bytes()[:-9] + b"x" * 9)

    assert command("snapshots", "verify", str(url)) == 1
    assert case.folder in capsys.readouterr().out
    can_be_done = case.rebuilt or bool(changed)
    assert command("snapshots", "repair", str(url)) == int(can_be_done)
    assert case.words in capsys.readouterr().out
    assert command("snapshots", "repair", str(url), "--yes") == 0
    assert case.words in capsys.readouterr().out
    if not case.rebuilt:
        return
    after = load_weights(store, case.folder)
    assert not differences(after.state_dict, before.state_dict)
    assert after.facts == before.facts
    assert command("snapshots", "repair", str(url)) == 0
    assert command("snapshots", "verify", str(url)) == 0


def test_best_weights_are_not_repaired_from_another_step(
    finished: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = tmp_path / "run"
    shutil.copytree(finished("alone"), url)
    (folder,) = (url / "best").glob("000000000012.*")
    with (folder / "model.safetensors").open("r+b") as file:  # a user's own average, say
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    (folder / "manifest.json").unlink()
    assert command("snapshots", "repair", str(url)) == 0
    assert "holds other weights at their step" in capsys.readouterr().out
    assert SnapshotCatalog(Store.open(url)).snapshots()
