"""Snapshots that three ranks write behind training: what happens to one of them is known to all."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from laws.lives import Setting, Tangled, live

from midstride.engine import Trainer
from midstride.engine.errors import EngineError
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.snapshots.catalog import Position, SnapshotCatalog
from midstride.engine.storage.store import Store
from midstride.engine.testing import run_ranks


def tell(train: Callable[[str], None], folder: str) -> None:
    """Train, and write down how this rank ended."""
    said = Path(folder, f"rank-{os.environ['RANK']}.txt")
    try:
        train(f"{folder}/run")
        said.write_text("done")
    except EngineError as error:
        said.write_text(f"{type(error).__name__}: {error}")
        raise


@pytest.mark.parametrize("phase", ["snapshot_write", "before_commit"])
@pytest.mark.parametrize("rank", [0, 2])
def test_an_error_of_one_writer_ends_every_rank_with_its_cause(rank: int, phase: str, tmp_path: Path) -> None:
    plan = FaultPlan(tmp_path / "plan").add("raise", rank=rank, step=4, phase=phase)
    setting = Setting(ranks=3)
    environment = {**os.environ, **plan.environment}
    codes = run_ranks(tell, setting.train, str(tmp_path), processes=3, environment=environment)
    assert codes == [1, 1, 1]
    plan.assert_all_fired()
    said = {(tmp_path / f"rank-{number}.txt").read_text() for number in range(3)}
    words = f"SnapshotError: snapshot 000000000004-g000001 was not taken, rank {rank} says: InjectedFault: injected"
    assert len(said) == 1
    assert next(iter(said)).startswith(words)
    newest = SnapshotCatalog(Store.open(tmp_path / "run")).newest_good()
    assert newest is not None
    # The last word of rank 0 was "committed" where a later rank failed after saying that its files are there.
    assert (newest.position >= Position(4)) == ((rank, phase) == (2, "before_commit"))


def test_a_rank_that_dies_while_it_writes_hangs_nobody(tmp_path: Path) -> None:
    plan = FaultPlan(tmp_path / "plan").add("kill", rank=1, step=4, phase="snapshot_write")
    codes = live(Setting(ranks=3), tmp_path, plan)
    plan.assert_all_fired()
    assert codes[1] == -9
    assert codes[0] == codes[2] == 1
    newest = SnapshotCatalog(Store.open(tmp_path / "run")).newest_good()
    assert newest is not None
    assert newest.position < Position(4)


class Failing(Tangled):
    """Fails at its sixth batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.progress.step == 5:
            raise RuntimeError("the user's own")


def test_taken_snapshots_are_committed_after_an_error(tmp_path: Path) -> None:
    codes = live(Setting(ranks=2, layout="every step", module=Failing), tmp_path)
    assert codes == [2, 2]
    newest = SnapshotCatalog(Store.open(tmp_path / "run")).newest_good()
    assert newest is not None
    assert newest.position == Position(5)


def test_without_snapshots_there_is_no_writer_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`snapshots: null`."""
    started: list[str] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: started.append(thread.name) or start(thread))
    Setting(options={"snapshots": None}).train(str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    assert started == []
    assert not torch.are_deterministic_algorithms_enabled()
    assert Trainer(snapshots=None).settings.snapshots is None
