"""Data that training changes: what a pass began with, and what of it workers see at once."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset
from unit.data.test_worker_data import Ones, Streamed, negated, resumable, sums, tripled


def chosen() -> Any:
    return Subset(Subset(TensorDataset(torch.arange(8.0)), range(8)), [*range(8)])


def turned(data: Any) -> None:
    data.indices.reverse()


def written(data: Any) -> None:
    data.dataset.dataset.tensors[0].numpy()[:] = 1.0


def widened(data: Any) -> None:
    data.indices[0] = False  # equal to 0


def reclassed(data: Any) -> None:
    data.__class__ = Reversed


class Reversed(Subset[Any]):
    pass


@pytest.mark.parametrize("change", [turned, written, widened, reclassed])
def test_changed_torch_data_have_their_initial_form_in_the_state(change: Any) -> None:
    data, resumed = chosen(), chosen()
    read = resumable(DataLoader(data, 4, num_workers=1))
    batches = read.batches(0)
    next(batches)
    change(data)
    state = read.state_dict()
    assert "start" in state

    change(resumed)
    again = resumable(DataLoader(resumed, 4, num_workers=1))
    again.load_state_dict(state)

    rest, expected = again.batches(0, 1), list(batches)
    assert [[*map(torch.Tensor.tolist, batch)] for batch in rest] == [[*map(torch.Tensor.tolist, b)] for b in expected]
    assert type(resumed) is type(data)
    assert resumed.indices == data.indices


def test_an_added_attribute_of_data_is_removed_by_a_restore() -> None:
    data = Ones()
    read = resumable(DataLoader(data, 4, num_workers=1))
    batches = read.batches(0)
    next(batches)
    assert "start" not in read.state_dict()

    data.later = 1  # type: ignore[attr-defined]

    assert "later" not in read.state_dict()["start"]["data set"]


def scaled(by: list[float]) -> Any:
    return lambda rows: torch.stack(rows) * sum(by)


@pytest.mark.parametrize("data", [Ones, Streamed])
def test_a_resumed_pass_keeps_its_own_collate_fn(data: Any) -> None:
    loader: DataLoader[Any] = DataLoader(data(), 2, collate_fn=scaled([2.0]))
    read = resumable(loader)
    batches = read.batches(0)
    next(batches)
    loader.collate_fn = scaled([3.0])
    state = read.state_dict()

    other: DataLoader[Any] = DataLoader(data(), 2, collate_fn=scaled([3.0]))  # as training has set it anew
    again = resumable(other)
    again.load_state_dict(state)

    rest = again.batches(0, 1)
    assert float(next(rest).sum()) == 4.0
    held: Any = other.collate_fn.__closure__
    held[0].cell_contents.append(1.0)
    assert [float(batch.sum()) for batch in rest] == [4.0, 4.0]
    assert sums(again, 1) == [8.0] * 4


def test_a_pass_without_workers_is_gone_on_with_in_workers() -> None:
    loader: DataLoader[Any] = DataLoader(Ones(), 2)
    read = resumable(loader)
    batches = read.batches(0)
    next(batches)
    loader.collate_fn = negated
    state = read.state_dict()

    other: DataLoader[Any] = DataLoader(Ones(), 2, num_workers=1)
    again = resumable(other)
    other.collate_fn, other.worker_init_fn = negated, tripled
    again.load_state_dict(state)

    assert sums(again, 0, 1) == [6.0] * 3
    assert sums(again, 1) == [-6.0] * 4


def test_data_that_grow_are_read_from_the_next_epoch_on() -> None:
    data = [torch.ones(())] * 8
    read = resumable(DataLoader(data, 4))  # type: ignore[arg-type]
    assert sums(read, 0) == [4.0, 4.0]
    data.append(torch.ones(()))

    batches = read.batches(1)
    assert len(read) == 3
    next(batches)
    data += [torch.ones(())] * 7
    state = read.state_dict()
    assert [float(batch.sum()) for batch in batches] == [4.0, 1.0]
    assert sums(read, 2) == [4.0] * 4

    again = resumable(DataLoader([torch.ones(())] * 16, 4))  # type: ignore[arg-type]
    again.load_state_dict(state)
    assert sums(again, 1, 1) == [4.0, 1.0]
    assert sums(again, 2) == [4.0] * 4
    del data[3:]
    assert sums(read, 3) == [3.0]


def test_a_batch_size_set_in_training_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    loader: Any = DataLoader([torch.ones(())] * 8, 4)  # type: ignore[arg-type]
    read = resumable(loader)
    for epoch in range(3):
        assert sums(read, epoch) == [4.0, 4.0]
        loader.batch_sampler.batch_size += 2

    assert [record.message for record in caplog.records] == [
        "the batch sampler of the train loader has batch_size=6, drop_last=False now, and had batch_size=4, "
        "drop_last=False at first: batches stay as they were. A batch sampler of your own may give batches of any "
        "size, as many in each epoch"
    ]


class Heard(Ones):
    """What it holds, its workers hear of at once; they make nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.told = torch.zeros(2).share_memory_()
        self.array = self.told.numpy()


@pytest.mark.parametrize("persistent", [False, True])
def test_shared_memory_changed_during_reads_is_named_once(persistent: bool, caplog: pytest.LogCaptureFixture) -> None:
    data = Heard()
    read = resumable(DataLoader(data, 2, num_workers=1, persistent_workers=persistent))
    for epoch in range(2):
        data.told += 1  # between epochs
        list(read.batches(epoch))
    data.told += 1
    assert "start" not in read.state_dict()
    assert not caplog.records

    batches = read.batches(2)
    next(batches)
    data.told += 1
    read.state_dict()
    data.told += 1
    list(batches)

    assert [record.getMessage().split(" in memory")[0] for record in caplog.records] == ["data set.array has changed"]
