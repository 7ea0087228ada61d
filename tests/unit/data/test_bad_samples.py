"""Samples that cannot be read are left out, counted and listed, if that is asked for."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import nets
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from midstride.engine import Trainer
from midstride.engine.errors import UserCodeError, UserError
from midstride.engine.runs.audit import audit
from midstride.engine.state.differences import differences
from midstride.engine.testing import final_state, run_ranks

BAD = {3, 17}


class Damaged(Dataset[Tensor]):
    """Samples with noise, some of which are damaged."""

    def __init__(self, bad: set[int] = BAD) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        if index in self.bad:
            raise ValueError(f"sample {index} is damaged")
        return torch.tensor([float(index)]) + torch.rand(1)


class Net(nets.Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen = list[list[int]]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append([int(value) for value in batch.flatten()])
        return super().training_step([batch], batch_idx) / 1e4


def fit(run: Path, steps: int = 20, *, skip: int = 2, workers: int = 0, data: Any = None, **options: Any) -> Net:
    """Train for two epochs of ten batches, or up to a step."""
    options |= {"bad_samples": {"skip": skip}} if skip else {}
    trainer = Trainer(max_epochs=2, max_steps=steps, snapshots={"every_steps": 2}, enable_progress_bar=False, **options)
    module = Net()
    loader: Any = DataLoader(data or Damaged(), 4, shuffle=not data, num_workers=workers)
    trainer.fit(module, loader, run=run)
    return module


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_left_out_alike_by_a_resumed_run(workers: int, tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", workers=workers)
    assert sorted(index for batch in whole.seen for index in batch) == sorted([*{*range(40)} - BAD] * 2)
    for steps in (5, 13, 20):
        resumed = fit(tmp_path / "broken", steps, workers=workers)
    assert resumed.seen == whole.seen  # which is state
    account = audit(str(tmp_path / "broken"))
    assert account.is_clean
    assert len(account.bad_samples) == 4
    assert "sample 3 could not be read and was left out of epoch 0, batch" in "\n".join(account.bad_samples)
    ours, theirs = (final_state(str(tmp_path / name))[0]["samples"] for name in ("broken", "whole"))
    assert not differences(ours, theirs)


@pytest.mark.parametrize(
    ("skip", "data", "words"),
    [
        (1, None, "2 samples cannot be read, and bad_samples leaves out 1"),
        (0, None, "ValueError: sample .* is damaged"),
        (40, Damaged({*range(40)}), "none of the 4 samples of a batch can be read"),
    ],
)
def test_too_many_bad_samples_end_the_run(skip: int, data: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match=words):
        fit(tmp_path, skip=skip, data=data)


def _on_ranks(folder: Path) -> None:
    """Train on two ranks, each of which gets five batches of an epoch."""
    whole = fit(folder / "whole", 10, strategy="ddp")
    for steps in (3, 7, 10):
        resumed = fit(folder / "broken", steps, strategy="ddp")
    assert resumed.seen == whole.seen
    assert not {*BAD} & {index for batch in whole.seen for index in batch}
    # Each rank reads one of them, between two snapshots or before and after one; or one rank reads both.
    for one, other in ((3, 4), (3, 24), (4, 6)):
        with pytest.raises(
            UserCodeError, match=f"2 samples cannot be read, and bad_samples leaves out 1: {one}, {other}"
        ):
            fit(folder / f"{one} and {other}", 10, skip=1, data=Damaged({one, other}), strategy="ddp")
    with pytest.raises(UserCodeError, match="none of the 4 samples of a batch can be read; the first is 0"):
        fit(folder / "a whole batch of rank 0", 10, skip=40, data=Damaged({0, 2, 4, 6}), strategy="ddp")
    with pytest.raises(UserCodeError, match="skip_samples leaves out all 4 samples of a batch"):
        fit(
            folder / "all of them on request",
            10,
            skip=0,
            data=Damaged(set()),
            strategy="ddp",
            skip_samples=[0, 2, 4, 6],
        )


def test_ranks_leave_out_the_same_after_a_resume(tmp_path: Path) -> None:
    assert run_ranks(_on_ranks, tmp_path, processes=2) == [0, 0]
    accounts = [audit(str(tmp_path / name)) for name in ("whole", "broken")]
    assert accounts[0].bad_samples == accounts[1].bad_samples
    assert len(accounts[1].bad_samples) == 4
    assert accounts[1].is_clean


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.ones(4, 1))


def test_samples_of_a_stream_cannot_be_left_out(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="bad_samples: samples of the training loader have no index"):
        Trainer(max_epochs=1, bad_samples={"skip": 1}, enable_progress_bar=False).fit(Net(), DataLoader(Stream(), 2))
