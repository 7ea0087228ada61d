"""Map-style data that are others than in an earlier attempt, or on another rank."""

import logging
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import nets
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from midstride.engine import Callback, Loop, Trainer
from midstride.engine.config.options import TrainerOptions
from midstride.engine.data.data_check import ensure_same_data
from midstride.engine.data.resolve import LoaderSettings, training_reader
from midstride.engine.errors import NotExact
from midstride.engine.testing import run_ranks
from midstride.engine.world import World


class Rows(Dataset[Tensor]):
    """Rows of a draw, scaled by what training sets."""

    def __init__(self, seed: int) -> None:
        self.rows = torch.randn(24, 2, generator=torch.Generator().manual_seed(seed))
        self.scale = 1.0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index] * self.scale + torch.rand(2)


class Net(nets.Net):
    inputs, lr = 2, 0.01

    def __init__(self, grades: bool) -> None:
        super().__init__()
        self.grades = grades

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.grades:
            self.trainer.train_dataloader.dataset.scale *= 1.1
        return super().training_step([batch], batch_idx)


def fit(
    run: Path, seed: int, steps: int, *, workers: int = 0, grades: bool = False, kind: Any = Rows, **options: Any
) -> Any:
    """Train up to a step on rows of a seed."""
    rows = kind(seed)
    trainer = Trainer(max_epochs=9, max_steps=steps, snapshots={"every_steps": 2}, enable_progress_bar=False, **options)
    trainer.fit(Net(grades), DataLoader(rows, 4, shuffle=True, num_workers=workers), run=run)
    return rows


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [4, 6])
def test_other_data_than_when_the_run_began_are_refused(workers: int, steps: int, tmp_path: Path) -> None:
    fit(tmp_path, 1, steps, workers=workers)
    with pytest.raises(NotExact, match="other samples at the same indices than when the run began"):
        fit(tmp_path, 2, 12, workers=workers)
    fit(tmp_path, 1, 8, workers=2 - workers)
    fit(tmp_path, 2, 10, accept_change="samples")
    fit(tmp_path, 3, 12)


def test_data_that_differ_at_their_end_are_refused(tmp_path: Path) -> None:
    def fit_in_order(last: int, steps: int) -> None:
        rows = Rows(1)
        rows.rows[len(rows) - last :] += 1
        trainer = Trainer(max_steps=steps, snapshots={"every_steps": 2}, enable_progress_bar=False)
        trainer.fit(Net(False), DataLoader(rows, 4), run=tmp_path)

    fit_in_order(1, 2)
    with pytest.raises(NotExact, match="other samples at the same indices than when the run began"):
        fit_in_order(8, 4)
    fit_in_order(1, 4)


def loop(run: Path, seed: int, steps: int, held_out: int, **options: Any) -> None:
    """Train in a loop of one's own, up to a step, and evaluate on rows of another seed before each step."""
    script = Loop(run, snapshots={"every_steps": 2}, enable_progress_bar=False, **options)
    layer = nn.Linear(2, 1)
    script.keep(layer=layer)
    train = script.loader(DataLoader(Rows(seed), 4, shuffle=True))
    validation = script.loader(DataLoader(Rows(held_out), 4))
    try:
        for batch in script.steps(train, steps):
            layer(batch).sum().backward()
            with torch.no_grad():
                for held in validation:
                    layer(held)
    finally:
        script.close()


@pytest.mark.parametrize("others", [(2, 5), (1, 6)])
def test_other_data_than_when_a_loop_began_are_refused(others: tuple[int, int], tmp_path: Path) -> None:
    seed, held_out = others
    loop(tmp_path, 1, 4, 5)
    loop(tmp_path, 1, 6, 5)
    with pytest.raises(NotExact, match="other samples at the same indices than when the run began"):
        loop(tmp_path, seed, 12, held_out)
    loop(tmp_path, seed, 10, held_out, accept_change="samples")
    loop(tmp_path, seed, 12, held_out)


def test_data_that_training_changes_are_not_compared(tmp_path: Path) -> None:
    fit(tmp_path, 1, 4, grades=True)
    fit(tmp_path, 1, 8, grades=True)


class Scale(Callback):
    """Changes the data before the first batch, as a shuffle at the start of an epoch does."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.train_dataloader.dataset.scale += 1.0


@pytest.mark.parametrize("workers", [0, 2])
def test_data_that_change_before_the_first_batch_resume(workers: int, tmp_path: Path) -> None:
    for steps in (4, 6, 8):
        rows = fit(tmp_path, 1, steps, workers=workers, callbacks=[Scale()])
    assert rows.scale == 3.0


class Numbering:
    """Adds the number of the batch."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, samples: list[Tensor]) -> Tensor:
        self.batches += 1
        return torch.stack(samples) + self.batches


def fit_numbered(run: Path, steps: int, **options: Any) -> Tensor:
    trainer = Trainer(max_steps=steps, snapshots={"every_steps": 2}, enable_progress_bar=False, **options)
    net = Net(False)
    trainer.fit(net, DataLoader(Rows(1), 4, collate_fn=Numbering()), run=run)
    return torch.cat([weights.flatten() for weights in net.parameters()])


def test_a_collate_fn_that_counts_resumes_in_the_way_that_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotExact, match="set rng='batch' and num_workers=0, where a resumed run continues its count"):
        fit_numbered(tmp_path / "refused", 4)
    whole = fit_numbered(tmp_path / "whole", 8, rng="batch")
    for steps in (3, 8):
        resumed = fit_numbered(tmp_path / "broken", steps, rng="batch")
    assert torch.equal(resumed, whole)


class Counting(Rows):
    """Counts its reads."""

    reads = 0

    def __getitem__(self, index: int) -> Tensor:
        self.reads += 1
        return super().__getitem__(index)


def test_samples_that_are_compared_are_not_counted_as_read(tmp_path: Path) -> None:
    assert fit(tmp_path, 1, 4, kind=Counting).reads == 16


def _on_ranks(run: str, seeds: tuple[int, ...], user: str) -> None:
    seed = seeds[int(os.environ["RANK"])]
    train = partial(fit, strategy="ddp") if user == "Trainer" else partial(loop, held_out=5)
    if len({*seeds}) == 1:
        train(Path(run), seed, 3)
        return
    with pytest.raises(NotExact, match="different samples at the same indices on different ranks"):
        train(Path(run), seed, 3)


@pytest.mark.parametrize("user", ["Trainer", "Loop"])
@pytest.mark.parametrize("seeds", [(1, 1), (1, 2)])
def test_data_that_differ_between_ranks_are_refused(seeds: tuple[int, ...], user: str, tmp_path: Path) -> None:
    assert run_ranks(_on_ranks, str(tmp_path), seeds, user, processes=2) == [0, 0]


class Numbers(IterableDataset[Tensor]):
    """The numbers of a part."""

    def __init__(self, part: int) -> None:
        self.part = part

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(8.0) + 10 * self.part)


LOADERS: dict[str, Any] = {
    "stream": lambda part: DataLoader(Numbers(part), 2),
    "function": lambda part: lambda: iter(Numbers(part)),
}


def reader_on(rank: int, loader: Any, **options: Any) -> Any:
    settings = LoaderSettings(World(rank=rank, size=3), TrainerOptions.model_validate(options), 7)
    return training_reader(loader, "the loader", settings, seed=7)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(("parts", "named"), [((0, 1, 2), []), ((0, 1, 0), ["0, 2"]), ((0, 0, 0), ["0, 1, 2"])])
def test_ranks_that_read_the_same_are_named_once(
    kind: str, parts: tuple[int, ...], named: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    readers = [reader_on(rank, LOADERS[kind](part)) for rank, part in enumerate(parts)]
    batches = [reader.batches(0) for reader in readers]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert all(next(iterator) is not None for iterator in batches)
            everyone = [[*reader.data_digests()] for reader in readers]
            assert not ensure_same_data(everyone, accepts_change=False, warns=True)
            ensure_same_data(everyone, accepts_change=False, warns=False)
    assert len(caplog.records) == len(named)
    assert all(f"gives ranks {ranks} the same first batch" in caplog.text for ranks in named)


def test_ranks_that_are_to_read_all_are_not_compared() -> None:
    reader = reader_on(0, LOADERS["stream"](0), use_distributed_sampler=False)
    assert next(reader.batches(0)) is not None
    assert not reader.data_digests()
