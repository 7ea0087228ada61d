"""Values that the ranks of one machine share: the last one of each key, whatever happens to a rank that sets one."""

import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from midstride.engine.session.private_file import AnonymousFile
from midstride.engine.strategies import shared_values
from midstride.engine.strategies.shared_values import SharedValues

pytestmark = pytest.mark.fast


def test_threads_of_all_ranks_set_and_read_at_once() -> None:
    values = SharedValues(AnonymousFile())

    def rank(number: int) -> list[int]:
        mine, seen = values.clone(), []
        for step in range(100):
            mine.set(f"seen/{number}", f"{step}" * (step % 7 + 1))
            seen.append(len(mine.get(f"seen/{number}")))
            assert mine.check([f"seen/{number}"])
        mine.set(f"done/{number}", "")
        mine.wait([f"done/{other}" for other in range(4)])
        return seen

    with ThreadPoolExecutor(4) as ranks:
        expected = [len(f"{step}" * (step % 7 + 1)) for step in range(100)]
        assert list(ranks.map(rank, range(4))) == [expected] * 4
    assert os.fstat(values._file.handle).st_size < 500, "old values are not kept"


def test_a_frozen_rank_keeps_no_other_from_reading() -> None:
    values, frozen = SharedValues(file := AnonymousFile()), AnonymousFile.at(file.path)
    values.set("key", "1")
    fcntl.flock(frozen.handle, fcntl.LOCK_EX)
    assert values.get("key") == b"1"
    with mock.patch.object(shared_values, "_WRITTEN_S", 0.1):
        with pytest.raises(dist.DistStoreError, match="it is frozen"):
            values.set("key", "2")
        with pytest.raises(dist.DistStoreError, match=r"not set within 0.1 s: key, other"):
            values.wait(["key", "other"], timedelta(seconds=0.1))
        os.pwrite(frozen.handle, b"[", 0)
        os.ftruncate(frozen.handle, 1)
        with pytest.raises(dist.DistStoreError, match="was killed"):
            values.get("key")
