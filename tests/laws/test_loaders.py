"""Law 1 for every kind of loader: read on from anywhere, in any number of lives, by any number of workers."""

import os
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from laws.axes import product
from laws.lives import SampleData, Samples, Setting, Tangled, assert_alike, live
from laws.loaders import LOADERS
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from midstride.engine import Trainer
from midstride.engine.data.dataloader_order import evaluation_loader, training_loader
from midstride.engine.data.loader import ResumableLoader
from midstride.engine.errors import UserError
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.seeds import Generators
from midstride.engine.state.codec import decode, encode
from midstride.engine.state.differences import differences
from midstride.engine.testing import run_ranks
from midstride.engine.world import World

EPOCHS = 3


def feed_of(kind: str, stage: str, *, rank: int = 0, ranks: int = 1, workers: int = 0) -> ResumableLoader:
    """Return what a rank of a new life reads."""
    data: Any = LOADERS[kind](ranks, workers)
    data.rank = rank
    limit = getattr(data, "limit", 1.0) if stage == "train" else 1.0
    arguments: dict[str, Any] = {"seed": 5, "shard": ranks > 1, "limit": limit, "rng": "lazy"}
    if stage == "train":
        return training_loader(data.train_dataloader(), World(rank=rank, size=ranks), **arguments)
    (loader,) = data.val_dataloader()
    return evaluation_loader(loader, World(rank=rank, size=ranks), stage=stage, number=0, **arguments)


def written(feed: ResumableLoader) -> Any:
    """Return the state of `feed` as a snapshot would give it back."""
    encoded = encode(feed.state_dict())
    return decode(encoded.document, encoded.tensors)


def read(feed: ResumableLoader, epoch: int, start: int, end: int | None = None) -> list[Any]:
    if end == start:
        return []
    batches = feed.batches(epoch, start)
    found = [next(batches) for _ in range((len(feed) if end is None else end) - start)]
    batches.close()
    return found


def check_lives(kind: str, stage: str, rank: int, ranks: int, workers: int, *deaths: int) -> None:
    """Read some epochs in one life, then in several that die at so many places, for each of `deaths`; compare all."""
    whole = feed_of(kind, stage, rank=rank, ranks=ranks)
    main = Generators().state_dict()
    epochs = [0] * EPOCHS if stage != "train" else range(EPOCHS)  # an evaluation is read from its start each time
    expected = [read(whole, epoch, 0) for epoch in epochs]
    assert not differences(main, Generators().state_dict())
    for number in deaths:
        draw = random.Random(f"{kind} {stage} {rank} {number}")
        deaths_at = (draw.randrange(EPOCHS) for _ in range(number))
        stops = sorted((epoch, draw.randint(0, len(expected[epoch]))) for epoch in deaths_at)
        found, state = read_in_lives(
            partial(feed_of, kind, stage, rank=rank, ranks=ranks, workers=workers), epochs, stops
        )
        assert not differences(expected, found)
        assert not differences(whole.state_dict(), state)


def read_in_lives(
    feed: Callable[[], ResumableLoader], epochs: Sequence[int], stops: list[tuple[int, int]]
) -> tuple[list[list[Any]], Any]:
    """Return the batches of each epoch, and the last state, of lives of which each but the last ends at a stop."""
    number, start, state, found = 0, 0, None, [[] for _ in epochs]
    for death in [*stops, (len(epochs), 0)]:
        life = feed()
        if state is not None:
            life.load_state_dict(state)
            assert not differences(state, life.state_dict())
        while (number, start) < death and number < len(epochs):
            end = death[1] if number == death[0] else None
            found[number] += read(life, epochs[number], start, end)
            number, start = (number + 1, 0) if end is None else (number, end)
        state = written(life)
    return found, state


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", LOADERS)
def test_read_on_by_any_number_of_lives(kind: str, ranks: int) -> None:
    for stage in ("train", "validate"):
        for rank in range(ranks):
            check_lives(kind, stage, rank, ranks, 0, 1, 2, 5)


def _with_workers(kind: str) -> None:
    check_lives(kind, "train", 1, 2, 2, 2)


@pytest.mark.parametrize("kind", LOADERS)
def test_read_on_by_workers(kind: str) -> None:
    # In a process of its own, as a rank is: other tests leave threads here, over which no worker should be forked.
    assert run_ranks(_with_workers, kind) == [0]


def _ordered_otherwise() -> None:
    rank = int(os.environ["RANK"])
    sampler = RandomSampler(range(12), generator=torch.Generator().manual_seed(rank))
    loader: Any = DataLoader(range(12), 2, sampler=sampler)
    with pytest.raises(UserError, match="the ranks share the training samples, but differ in sampler: rank 0 has"):
        Trainer(strategy="ddp", max_epochs=1, enable_progress_bar=False).fit(Tangled(), loader)


def test_ranks_with_different_sample_orders_are_refused() -> None:
    assert run_ranks(_ordered_otherwise, processes=2) == [0, 0]


class Importance(Tangled):
    """Tells the sampler of its rank alone what it found out there."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        sampler = self.trainer.last_fit.context.loaders.training.source.sampler
        sampler.weights[self.trainer.world.rank] += 9


def _ordered_otherwise_later() -> None:
    sampler = WeightedRandomSampler(torch.ones(13), 13)
    loader: Any = DataLoader(Samples(13), 1, sampler=sampler)
    trainer = Trainer(strategy="ddp", max_epochs=9, val_check_interval=1.0, enable_progress_bar=False)
    with pytest.raises(UserError, match="different orders in epoch 1") as caught:
        trainer.fit(Importance(), loader)
    assert len({*re.findall(r"[0-9a-f]{16}", str(caught.value))}) == 3
    assert trainer.progress.epoch == 1


def test_samplers_that_differ_are_refused_in_the_next_epoch() -> None:
    assert run_ranks(_ordered_otherwise_later, processes=3) == [0, 0, 0]


class Misled(Tangled):
    """Tells the samplers of its rank alone what it found out there."""

    def __init__(self, samplers: list[Any]) -> None:
        super().__init__()
        self.samplers = samplers

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["long"] if isinstance(batch, dict) else batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for sampler in self.samplers:
            sampler.weights[self.trainer.world.rank] += 9


def _misled(of: str, where: str) -> None:
    sampler = WeightedRandomSampler(torch.ones(13), 13)
    told: Any = DataLoader(Samples(13), 1, sampler=sampler)
    plain: Any = DataLoader(Samples(24), 1)
    loaders = (plain, told) if of == "evaluation" else ({"long": plain, "short": told}, None)
    trainer = Trainer(strategy="ddp", max_epochs=2, val_check_interval=4, enable_progress_bar=False)
    with pytest.raises(UserError, match=f"different orders in {where}"):
        trainer.fit(Misled([sampler]), *loaders)


@pytest.mark.parametrize(("of", "where"), [("evaluation", "an evaluation"), ("laps", "epoch 0")])
def test_samplers_that_ranks_set_differently_are_refused(of: str, where: str) -> None:
    assert run_ranks(_misled, of, where, processes=2) == [0, 0]


def _without_fork(context: str) -> None:
    whole = read(feed_of("persistent workers", "train"), 0, 0)
    given: Any = LOADERS["persistent workers"](1, 2).train_dataloader()
    given.multiprocessing_context = context
    feed = training_loader(given, World(), seed=5, shard=False, limit=1.0)
    feed.attach(module := Tangled())
    module.act = lambda values: values  # which cannot be pickled, as its trainer cannot
    assert not differences(whole[2:], read(feed, 0, 2))


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_that_are_not_forked(context: str) -> None:
    assert run_ranks(_without_fork, context) == [0]


def _hooked(workers: int, log: Path) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    feed = feed_of("a hook that reseeds", "train", workers=workers)
    dataset: Any = feed.source.dataset
    before = dataset.state
    for epoch in range(EPOCHS):
        read(feed, epoch, 0)
        assert dataset.state is before


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_hook_seeds_is_no_memory_of_the_data(workers: int, tmp_path: Path) -> None:
    assert run_ranks(_hooked, workers, log := tmp_path / "log.txt") == [0]
    assert "reading changes" not in log.read_text()


DEATHS = [(0, "fetch"), (3, "validation"), (5, "after_step"), (6, "validation"), (8, "backward")]
AXES: dict[str, list[Any]] = {
    "kind": list(LOADERS),
    "ranks": [1, 2],  # what is read has no sum whose order counts
    "workers": [0, 2],
    "deaths": [1, 2, 5],
    "death": list(range(len(DEATHS))),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        every = product({**AXES, "ranks": [1, 2, 3]})
        if metafunc.config.getoption("--laws") != "all":
            # every kind once; the rest in turn, so that it all appears
            draw = random.Random(1)
            rest = product({name: values for name, values in AXES.items() if name != "kind"})
            every = [
                {"kind": kind, **case} for kind, case in zip(LOADERS, draw.sample(rest, len(LOADERS)), strict=True)
            ]
        metafunc.parametrize("case", every, ids=lambda case: "-".join(str(v).replace(" ", "_") for v in case.values()))


def test_a_killed_run_ends_with_the_same_bits(
    case: dict[str, Any], tmp_path: Path, undisturbed: Callable[[Setting], Path]
) -> None:
    data: type[SampleData] = LOADERS[case["kind"]]
    ranks = case["ranks"]
    module, options = getattr(data, "module", Tangled), {"val_check_interval": 1.0}
    options |= {"limit_train_batches": data.limit} if hasattr(data, "limit") else {}
    plain = Setting(ranks, options=options, module=module, data=data)
    plan = FaultPlan(tmp_path / "plan")
    deaths = [DEATHS[(case["death"] + number) % len(DEATHS)] for number in range(case["deaths"])]
    for step, phase in deaths:
        plan.add("kill", rank=step % ranks, step=step, phase=phase)
    lives = 0
    while len(plan.fired()) < len(deaths):
        setting = replace(plain, workers=(case["workers"] + lives) % 3)
        assert -9 in live(setting, tmp_path, plan)
        lives += 1
    assert live(replace(plain, workers=case["workers"]), tmp_path, plan) == [0] * ranks
    plan.assert_all_fired()
    assert_alike(tmp_path, undisturbed(plain))
