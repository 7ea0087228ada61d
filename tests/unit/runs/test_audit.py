"""The audit: law 3 told from a run's folder, and every breach of it told by name."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import run
from support.nets import Net
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, TensorDataset

from midstride.engine import Callback, Trainer
from midstride.engine.checkpointing.sample_log import SampleLog, digest_of
from midstride.engine.data.order import InOrder, StridedOrder
from midstride.engine.errors import SnapshotMissing
from midstride.engine.runs.audit import audit

Record = Callable[[SampleLog, int, int, list[int], int], None]
RECORD: Record = SampleLog.record  # type: ignore[assignment]


def fit(run: Path, *, drop_last: bool = False, **options: Any) -> None:
    data = DataLoader(TensorDataset(torch.arange(10.0)[:, None]), 3, shuffle=True, drop_last=drop_last)
    options = {"max_epochs": 2, "snapshots": {"every_steps": 1}, **options}
    Trainer(**options).fit(Net(), data, run=str(run))


def test_an_epoch_is_told_in_full(tmp_path: Path) -> None:
    fit(tmp_path)
    found = audit(str(tmp_path))
    assert found.is_clean
    assert (found.step, found.rows) == (8, 8)
    for epoch in found.epochs:
        assert (epoch.batches, epoch.samples, epoch.expected, epoch.once) == (4, 10, 10, 10)
        assert (epoch.repeated, epoch.missing, epoch.padding, epoch.left_over) == (0, 0, 0, 0)
        assert epoch.is_over


@pytest.mark.parametrize(
    ("options", "used"), [({"drop_last": True}, 9), ({"limit_train_batches": 2}, 6), ({"limit_train_batches": 0.5}, 6)]
)
def test_what_was_to_be_left_over_is_not_missing(options: dict[str, Any], used: int, tmp_path: Path) -> None:
    fit(tmp_path, **options)
    found = audit(str(tmp_path))
    assert found.is_clean
    assert [(e.once, e.missing, e.left_over) for e in found.epochs] == [(used, 0, 10 - used)] * 2


def test_an_epoch_under_way_misses_nothing_yet(tmp_path: Path) -> None:
    fit(tmp_path, max_epochs=None, max_steps=6)
    first, second = audit(str(tmp_path)).epochs
    assert first.is_over
    assert (second.is_over, second.batches, second.missing, second.faults) == (False, 2, 0, ())


def test_an_epoch_that_a_stop_broke_off_misses_nothing(tmp_path: Path) -> None:
    class Stops(Callback):
        def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
            if trainer.global_step == 2:
                trainer.stop()

    fit(tmp_path, callbacks=Stops())
    (only,) = audit(str(tmp_path)).epochs
    assert (only.is_over, only.batches, only.missing, only.faults) == (False, 2, 0, ())
    fit(tmp_path, callbacks=Stops(), min_epochs=2)
    broken_off, whole = audit(str(tmp_path)).epochs
    assert (broken_off.is_over, broken_off.batches, broken_off.faults) == (False, 2, ())
    assert (whole.is_over, whole.once, whole.faults) == (True, 10, ())


def left_out(account: SampleLog, epoch: int, batch: int, indices: list[int], *rest: int) -> None:
    if (epoch, batch) != (1, 2):
        RECORD(account, epoch, batch, indices, *rest)


def repeated(account: SampleLog, epoch: int, batch: int, indices: list[int], *rest: int) -> None:
    RECORD(account, epoch, batch, indices, *rest)
    if (epoch, batch) == (1, 2):
        RECORD(account, epoch, batch, indices, *rest)


def exchanged(account: SampleLog, epoch: int, batch: int, indices: list[int], *rest: int) -> None:
    RECORD(account, epoch, batch, indices[::-1] if (epoch, batch) == (1, 2) else indices, *rest)


def cut_short(account: SampleLog, epoch: int, batch: int, indices: list[int], *rest: int) -> None:
    if (epoch, batch) != (0, 3):
        RECORD(account, epoch, batch, indices, *rest)


BREACHES: list[tuple[Record, str]] = [
    (left_out, "batch 2 never reached the training step"),
    (repeated, "batch 2 reached the training step again"),
    (exchanged, "batches 0 to 3: the 10 samples that reached the training step are not the 10 of the epoch's order"),
    (cut_short, "batch 3 never reached the training step"),
]


@pytest.mark.parametrize(("record", "fault"), BREACHES)
def test_every_breach_is_told_and_ends_with_1(
    record: Record, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(SampleLog, "record", record)
    fit(tmp_path / "run")
    assert run("audit", str(tmp_path)) == 1  # a store of runs does as well
    assert [f for epoch in audit(str(tmp_path / "run")).epochs for f in epoch.faults] == [fault]
    assert "samples or rows are wrong" in capsys.readouterr().out


def test_an_audit_of_a_clean_run_ends_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path / "run")
    assert run("audit", str(tmp_path / "run")) == 0
    assert "each sample once" in capsys.readouterr().out
    (tmp_path / "empty" / "snapshots").mkdir(parents=True)
    with pytest.raises(SnapshotMissing, match="from the first snapshot on"):
        audit(str(tmp_path / "empty"))


def entered(account: SampleLog, order: StridedOrder, epoch: int, batches: range) -> None:
    indices = order.indices(epoch)
    for batch in batches:
        account.record(epoch, batch, indices[batch * order.batch_size :][: order.batch_size], order.batch_size)


def test_shares_of_ranks_are_merged_into_one_line_a_stretch() -> None:
    orders = [StridedOrder(InOrder(12), 2, rank=rank, size=2) for rank in range(2)]
    accounts = [SampleLog(rank, 2) for rank in range(2)]
    for batches in (range(2), range(2, 3)):
        for account, order in zip(accounts, orders, strict=True):
            entered(account, order, 0, batches)
        shares = [(rank, {}, list(account._open), set(), ()) for rank, account in enumerate(accounts)]
        accounts[0].merge_ranks(lambda _, shares=shares: shares)
        accounts[1]._open = []
    digest = sum(digest_of(o.indices(0)[b * 2 : b * 2 + 2], b, o.rank) for o in orders for b in range(3)) % (1 << 64)
    assert accounts[0].state_dict()["stretches"] == [(0, 0, 3, 2, 12, digest, True)]


def test_what_was_entered_after_the_last_snapshot_is_struck_out() -> None:
    order, account = StridedOrder(InOrder(12), 2), SampleLog(0, 1)
    entered(account, order, 0, range(3))
    account.merge_ranks(lambda mine: [mine])
    state = account.state_dict()
    entered(account, order, 0, range(3, 5))
    account.load_state_dict(state)
    entered(account, order, 0, range(3, 6))
    account.merge_ranks(lambda mine: [mine])
    assert [one[1:3] for one in account.state_dict()["stretches"]] == [(0, 6)]


class Own(Sampler[int]):
    """A sampler with repetition and without a rule."""

    def __iter__(self) -> Iterator[int]:
        return iter([0, 0, 3, 9, 8, 7, 1, 2])


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([torch.tensor([float(number)]) for number in range(10)])


@pytest.mark.parametrize(("record", "fault"), [(RECORD, None), (exchanged, "the 8 .* not the 8 that"), BREACHES[0]])
def test_samples_of_a_sampler_are_compared_with_the_trained_ones(
    record: Record, fault: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SampleLog, "record", record)
    data: Any = DataLoader(TensorDataset(torch.arange(10.0)[:, None]), 3, sampler=Own())
    Trainer(max_epochs=2, snapshots={"every_steps": 1}).fit(Net(), data, run=str(tmp_path))
    found = audit(str(tmp_path))
    assert [epoch.is_counted for epoch in found.epochs] == [True, True]
    assert found.epochs[0].faults == ()
    assert found.is_clean == (fault is None)
    assert fault is None or any(re.search(fault, one) for one in found.epochs[1].faults)


def test_the_order_of_a_distributed_sampler_is_counted(tmp_path: Path) -> None:
    sampler: Any = DistributedSampler(range(10), num_replicas=1, rank=0, seed=3)
    data: Any = DataLoader(TensorDataset(torch.arange(10.0)[:, None]), 3, sampler=sampler)
    Trainer(max_epochs=2, snapshots={"every_steps": 1}).fit(Net(), data, run=str(tmp_path))
    found = audit(str(tmp_path))
    assert (found.is_clean, found.is_counted) == (True, True)


class FirstLine(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([batch], batch_idx)


class Placed(Numbers):
    """Goes on from a state."""

    start = 0

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.start, 10):
            self.start = number + 1
            yield torch.tensor([float(number)])
        self.start = 0

    def state_dict(self) -> dict[str, Any]:
        return {"start": self.start}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.start = state_dict["start"]


def train_on(stream: IterableDataset[Any], run: Path, workers: int = 0, **options: Any) -> None:
    options = {"max_epochs": 2, "snapshots": {"every_steps": 3}, **options}
    Trainer(**options).fit(FirstLine(), DataLoader(stream, 3, num_workers=workers), run=str(run))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stops", [0, 1])
def test_what_a_stream_gave_is_compared_with_what_was_trained_on(
    workers: int, stops: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(stops):
        train_on(Numbers(), tmp_path, workers, max_steps=3)
    train_on(Numbers(), tmp_path, workers)
    found = audit(str(tmp_path))
    assert (found.is_clean, found.is_counted) == (True, True)
    run("audit", str(tmp_path))
    assert "each sample was used once" in capsys.readouterr().out


def test_a_stateful_stream_is_counted_until_a_resume(tmp_path: Path) -> None:
    train_on(Placed(), tmp_path)
    found = audit(str(tmp_path))
    assert (found.is_clean, found.is_counted) == (True, True)


def exchanged_marks(account: SampleLog, epoch: int, batch: int, indices: Any, samples: int, *rest: Any) -> None:
    lane, mark = rest
    RECORD(account, epoch, batch, indices, samples, lane, mark + (batch == 1))  # type: ignore[call-arg]


def test_a_batch_of_a_stream_that_is_another_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SampleLog, "record", exchanged_marks)
    train_on(Numbers(), tmp_path)
    fault = "the samples that reached the training step are not those that the stream gave"
    assert [epoch.faults for epoch in audit(str(tmp_path)).epochs] == [(fault,), (fault,)]


def test_no_law_is_claimed_for_uncounted_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_on(Placed(), tmp_path, max_steps=3)
    train_on(Placed(), tmp_path)
    assert run("audit", str(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "each sample was used once" not in out
    assert "no fault found, but the samples of epochs 0, 1 were not counted" in out
    assert "each batch once, samples not counted" in out
