"""Weights alone: the best and the last of a run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.snapshot_files import Killed, flip
from support.snapshot_writers import save_weights
from torch import nn

from midstride.engine.errors import SnapshotDamaged, SnapshotMissing
from midstride.engine.snapshots.position import Position
from midstride.engine.snapshots.reader import load_weights, weights_at
from midstride.engine.snapshots.schedule import needed_weights
from midstride.engine.state.differences import differences
from midstride.engine.storage.store import Store

NAME = "000000000001-g000001"


def test_weights_come_back_tied_and_in_their_memory_format(store: Store):
    module = nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.Linear(3, 3), nn.Linear(3, 3))
    module[2].weight = module[1].weight
    facts = {"step": 12, "metrics": {"val/accuracy": 0.5, "bad": float("inf")}}
    save_weights(store, "best", module.state_dict(), facts)
    back = load_weights(store, "best")
    assert differences(module.state_dict(), back.state_dict) == []
    assert back.state_dict["0.weight"].is_contiguous(memory_format=torch.channels_last)
    assert back.state_dict["1.weight"].data_ptr() == back.state_dict["2.weight"].data_ptr()
    assert back.facts == facts


@pytest.mark.parametrize("copied", ["best", f"best/{NAME}"])
def test_a_copy_of_the_folder_is_read_anywhere(store: Store, tmp_path: Path, copied: str):
    save_weights(store, "best", {"w": torch.ones(3)}, {"step": 1})
    Path(store.url, copied).rename(tmp_path / "elsewhere")
    assert weights_at(tmp_path / "elsewhere").state_dict["w"].tolist() == [1.0] * 3


def test_any_tool_opens_the_tensors_by_name(store: Store):
    save_weights(store, "best", nn.Linear(2, 3).state_dict(), {"step": 1})
    assert set(load_file(Path(store.url, "best", NAME, "model.safetensors"))) == {"weight", "bias"}


@pytest.mark.parametrize("take", [1, 2])
def test_newer_weights_count(store: Store, take: int):
    save_weights(store, "last", {"w": torch.tensor(1.0)}, {"step": 1})
    save_weights(store, "last", {"w": torch.tensor(2.0)}, {"step": 3 - take}, take)
    assert load_weights(store, "last").state_dict["w"] == 2.0


@pytest.mark.disk
def test_a_kill_while_weights_are_replaced_leaves_whole_ones(store: Store, monkeypatch: pytest.MonkeyPatch):
    save_weights(store, "last", {"w": torch.tensor(1.0)}, {"step": 1})
    whole = type(store).write

    def die_at_the_manifest(self: Store, path: str, data: bytes, **options: Any) -> None:
        if path == f"last/{NAME}-02/manifest.json":
            raise Killed
        whole(self, path, data, **options)

    monkeypatch.setattr(type(store), "write", die_at_the_manifest)
    with pytest.raises(Killed):
        save_weights(store, "last", {"w": torch.tensor(2.0)}, {"step": 1}, take=2)
    monkeypatch.undo()
    assert load_weights(store, "last").state_dict["w"] == 1.0


def test_damaged_and_missing_weights_are_named(store: Store):
    with pytest.raises(SnapshotMissing, match=r"no weights were saved in .*/best"):
        load_weights(store, "best")
    save_weights(store, "best", {"w": torch.ones(5)}, {"step": 1})
    folder = Path(store.url, "best", NAME)
    flip(folder / "model.safetensors", 0.9)
    with pytest.raises(SnapshotDamaged, match=f"{NAME}/model.safetensors has checksum .* snapshots repair"):
        load_weights(store, "best")
    (folder / "model.safetensors").unlink()
    with pytest.raises(SnapshotDamaged, match=r"model\.safetensors is missing"):
        load_weights(store, "best")
    flip(folder / "manifest.json", 0.5)
    with pytest.raises(SnapshotDamaged, match=f"{NAME}/manifest.json"):
        load_weights(store, "best")


#: positions of weights, positions of snapshots -> which weights a run needs
NEEDED = [
    ([], [3], []),
    ([1, 2, 5, 6], [], [6]),
    ([1, 2, 5, 6], [3], [2, 6]),
    ([1, 2, 5, 6], [3, 5], [2, 5, 6]),
    ([1, 2, 2, 6], [2], [1, 2, 2, 6]),
    ([1, 2, 5, 6], [9], [6]),
]


@pytest.mark.parametrize(("weights", "snapshots", "needed"), NEEDED)
def test_weights_that_a_resumed_run_needs_stay(weights: list[int], snapshots: list[int], needed: list[int]):
    found = needed_weights([Position(step) for step in weights], [Position(step) for step in snapshots])
    assert [weights[number] for number in sorted(found)] == needed
