"""Loading takes little more memory than the weights."""

from pathlib import Path

import pytest
import torch
from support.child_process import in_child
from support.snapshot_writers import save_weights

from midstride.engine.snapshots.reader import load_weights
from midstride.engine.storage.store import Store

MB = 2**20


@pytest.mark.parametrize("each", [64 * MB, 4 * MB], ids=["few large", "many small"])
def test_loading_takes_little_more_memory_than_the_weights(tmp_path: Path, each: int) -> None:
    store, count = Store.open(tmp_path), 192 * MB // each
    save_weights(store, "best", {str(n): torch.full([each // 4], float(n)) for n in range(count)}, {})

    def loaded() -> None:
        state = load_weights(store, "best").state_dict
        assert [int(tensor[-1]) for tensor in state.values()] == [*range(count)]

    code, grown = in_child(loaded)
    assert code == 0
    assert count * each <= grown <= 1.3 * count * each
