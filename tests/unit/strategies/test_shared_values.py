"""Values that the ranks of one machine share: the last one of each key, whatever happens to a rank that sets one."""

import fcntl
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from midstride.engine.session.private_file import AnonymousFile
from midstride.engine.strategies import rendezvous
from midstride.engine.strategies.rendezvous import Meeting, SharedValues
from midstride.engine.strategies.torch_collective import TorchCollective
from midstride.engine.strategies.torch_internals import HashStore

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


def test_each_fit_of_a_process_has_values_of_its_own() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        first, second = (TorchCollective().key_value_store() for _ in range(2))
        first.set("proposal/0", "")
        assert first.check(["proposal/0"])
        assert not second.check(["proposal/0"]), "a request of the fit before"
    finally:
        dist.destroy_process_group()


def test_rank_0_may_be_done_with_values_before_others_have_opened_them() -> None:
    meeting = Meeting(AnonymousFile())
    stores = [meeting.store() for _ in range(3)]
    files = []
    for store in stores[:2]:
        values = SharedValues.of_ranks(store, 0, 3)
        files.append(weakref.ref(values._file))
        del values  # its fit was refused
    others = [SharedValues.of_ranks(stores[0], rank, 3) for rank in (1, 2)]
    others[0].set("key", "1")
    assert others[1].get("key") == b"1"
    late = SharedValues.of_ranks(stores[1], 1, 3)
    SharedValues.of_ranks(stores[2], 0, 3)
    assert [file() is not None for file in files] == [False, True], "a file is held until all have opened it"
    SharedValues.of_ranks(stores[1], 2, 3).set("key", "2")
    assert late.get("key") == b"2"


def test_a_frozen_rank_keeps_no_other_from_reading() -> None:
    values, frozen = SharedValues(file := AnonymousFile()), AnonymousFile.at(file.path)
    values.set("key", "1")
    fcntl.flock(frozen.handle, fcntl.LOCK_EX)
    assert values.get("key") == b"1"
    with mock.patch.object(rendezvous, "_WRITTEN_S", 0.1):
        with pytest.raises(dist.DistStoreError, match="it is frozen"):
            values.set("key", "2")
        with pytest.raises(dist.DistStoreError, match=r"not set within 0.1 s: key, other"):
            values.wait(["key", "other"], timedelta(seconds=0.1))
        os.pwrite(frozen.handle, b"[", 0)
        os.ftruncate(frozen.handle, 1)
        with pytest.raises(dist.DistStoreError, match="was killed"):
            values.get("key")
