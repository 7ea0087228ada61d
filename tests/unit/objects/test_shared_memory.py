"""Which memory other processes see."""

import ctypes
import mmap
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from midstride.engine.objects.left_out import is_shared
from midstride.engine.objects.object_state import Objects
from midstride.engine.objects.roots import Root

pytestmark = pytest.mark.fast


def test_numbers_of_multiprocessing_are_shared_unlike_ctypes() -> None:
    raw: Any = multiprocessing.RawArray("d", 2)
    made = [multiprocessing.Value("d"), multiprocessing.Array("d", 2), multiprocessing.RawValue("d"), raw]
    made.append(np.frombuffer(raw))  # type: ignore[arg-type]
    assert [is_shared(one) for one in made] == [True] * 5
    own = [
        ctypes.c_double(),
        (ctypes.c_double * 2)(),
        np.zeros(2),
        np.zeros(3)[1:],
        np.frombuffer(bytes(8)),
        1.0,
        [raw],
    ]
    assert [is_shared(one) for one in own] == [False] * 7


def test_tensors_and_arrays_are_as_their_memory() -> None:
    own, shared = torch.zeros(2), torch.zeros(2).share_memory_()
    assert [is_shared(one) for one in (own, own.numpy(), torch.zeros(2).to_sparse())] == [False] * 3
    assert [is_shared(one) for one in (shared, shared[1:], shared.numpy(), shared.numpy()[1:])] == [True] * 4
    assert is_shared(np.frombuffer(mmap.mmap(-1, 16)))


@pytest.mark.parametrize(("mode", "expected"), [("r+", True), ("r", True), ("c", False)])
def test_a_mapped_file_is_shared_unless_copied_on_write(mode: Any, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(16))
    array = np.memmap(tmp_path / "file", mode=mode)
    assert [is_shared(one) for one in (array, array[1:], np.asarray(array))] == [expected] * 3


@pytest.mark.parametrize(("mode", "watched"), [("r+", {"data/training/rows"}), ("r", set())])
def test_a_large_file_in_memory_is_watched_if_it_can_be_written(mode: Any, watched: set[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(2 << 20))
    held = {"rows": np.memmap(tmp_path / "file", mode=mode)}
    root = Root("data", "training", held, is_setup=True, is_data=True)
    objects = Objects(nn.Module(), lambda members, quiet: iter([root]), lambda members: {}, torch.device("cpu"))
    assert objects.watched.keys() == watched
