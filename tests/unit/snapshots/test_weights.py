"""Weights alone: the best and the last of a run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.snapshot_files import Killed, flip
from torch import nn

from midstride.engine.errors import (
    SnapshotDamaged,
    SnapshotMissing,
)
from midstride.engine.snapshots.weights import load_weights, save_weights
from midstride.engine.state.differences import differences
from midstride.engine.storage.store import Store


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
    flip(path, 0.9)
    with pytest.raises(SnapshotDamaged, match=f"{file} has checksum"):
        load_weights(store, "best")
    path.unlink()
    with pytest.raises(SnapshotDamaged, match=f"{file} is missing"):
        load_weights(store, "best")
    manifest = Path(store.url, "best", "000000000000-g000001.json")
    flip(manifest, 0.5)
    with pytest.raises(SnapshotDamaged, match=manifest.name):
        load_weights(store, "best")
