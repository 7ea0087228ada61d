"""Samples that cannot be read are left out, counted and listed, if that is asked for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from midstride.engine import Trainer, TrainingModule
from midstride.engine.errors import UserCodeError
from midstride.engine.runs.audit import audit
from midstride.engine.state.differences import differences
from midstride.engine.testing import final_state

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


class Net(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(1, 1), list[list[int]]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append([int(value) for value in batch.flatten()])
        return self.layer(batch).square().mean() / 1e4

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(run: Path, steps: int = 20, *, skip: int = 2, workers: int = 0, data: Any = None) -> Net:
    """Train for two epochs of ten batches, or up to a step."""
    options: dict[str, Any] = {"bad_samples": {"skip": skip}} if skip else {}
    trainer = Trainer(max_epochs=2, max_steps=steps, snapshots={"every_steps": 2}, enable_progress_bar=False, **options)
    module = Net()
    loader: Any = DataLoader(data or Damaged(), 4, shuffle=True, num_workers=workers)
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
