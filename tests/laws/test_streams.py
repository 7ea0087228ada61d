"""Laws 1 and 4 for iterable data sets and several loaders: from every batch, by any number of workers."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from laws.axes import product
from laws.lives import Setting, assert_alike, live
from laws.stream_packages import OPTIONAL, PACKAGES
from laws.streams import ITERABLES, STREAMS, Several, StreamData
from laws.whole_loaders import WHOLE
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, default_collate

from midstride.engine import Trainer
from midstride.engine.data.loader import ResumableLoader
from midstride.engine.data.resolve import LoaderResolver, LoaderSettings
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.runs.audit import audit
from midstride.engine.state.codec import decode, encode
from midstride.engine.state.differences import differences
from midstride.engine.testing import run_ranks

SEED = 7
#: rows that go on from a state of their own, so that no attempt reads an epoch from its start
STATEFUL = {
    *("state", "iterator with state", "state that is wrong later", "sampler", "sampler, its own iterator"),
    "a loader that says its state",
}
AXES: dict[str, list[Any]] = {"kind": list(STREAMS), "ranks": [1, 2], "workers": [(0, 2), (2, 0), (2, 1)]}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = product({**AXES, "ranks": [1, 2, 3], "deaths": [2]})
        if metafunc.config.getoption("--laws") != "all":
            # every kind once; the rest in turn, so that it all appears
            rest = product({name: values for name, values in AXES.items() if name != "kind"})
            cases = [{"kind": kind, **case, "deaths": 1} for kind, case in zip(STREAMS, cycle(rest), strict=False)]
            # All validate on the same data: of each world one dies there, too.
            for case in cases[: len(rest)]:
                case["deaths"] = 2
        metafunc.parametrize("case", cases, ids=lambda case: "-".join(str(v).replace(" ", "_") for v in case.values()))


def feed_of(loaders: Any) -> ResumableLoader:
    """Return the training feed of a single process."""
    trainer = Trainer(strategy="single", max_epochs=1, seed=SEED, enable_progress_bar=False)
    settings = LoaderSettings(trainer.strategy.data_world, trainer.options, trainer.settings.seed)
    return LoaderResolver(settings, trainer.strategy.collective, None, train=loaders).training()


def same(ours: Any, theirs: Any) -> bool:
    """Compare two nests of batches bit for bit."""
    (mine, shape), (others, other_shape) = pytree.tree_flatten(ours), pytree.tree_flatten(theirs)
    return shape == other_shape and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(mine, others, strict=True)
    )


def test_a_killed_run_over_any_loader_ends_with_the_same_bits(
    case: dict[str, Any], tmp_path: Path, undisturbed: Callable[[Setting], Path]
) -> None:
    (first, second), ranks = case["workers"], case["ranks"]
    options = {"val_check_interval": 1.0}
    data = partial(StreamData, case["kind"])
    setting = Setting(ranks, workers=first, options=options, module=Several, data=data)
    expected = undisturbed(setting)
    journal = [json.loads(line)[0] for line in (expected / "journal.jsonl").read_text().splitlines()]
    batches = 1 + max(batch for _, epoch, batch in journal if epoch == 0)
    # In the second epoch: by then a snapshot is there, which says how many shards the first life read.
    plan = FaultPlan(tmp_path / "plan").add("kill", rank=ranks - 1, step=batches + 1, phase="backward")
    lives = [setting, replace(setting, workers=second), setting][: case["deaths"] + 1]
    if case["deaths"] == 2:
        plan.add("kill", step=2 * batches, phase="validation", visit=6 if ranks == 1 else 4)

    for life in lives[:-1]:
        assert -9 in live(life, tmp_path, plan)
    assert live(lives[-1], tmp_path, plan) == [0] * ranks

    plan.assert_all_fired()
    assert_alike(tmp_path, expected)
    has_marks = case["kind"] in {**ITERABLES, **WHOLE}
    assert audit(str(expected / "run")).is_counted == has_marks
    assert audit(str(tmp_path / "run")).is_counted == (has_marks and case["kind"] not in STATEFUL)


@pytest.mark.parametrize(("kind", "words"), [("state", "decides what each rank reads"), ("dict", "several loaders")])
def test_another_number_of_processes_is_refused_by_name(kind: str, words: str, tmp_path: Path) -> None:
    options = {"max_epochs": None, "max_steps": 2, "val_check_interval": 1.0}
    setting = Setting(2, "every step", 0, options, Several, data=partial(StreamData, kind))
    assert live(setting, tmp_path) == [0, 0]
    assert live(replace(setting, ranks=3), tmp_path) == [2, 2, 2]
    assert words in str(feed_of(STREAMS[kind](1, 0, 0.1)).fixed_world)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", STREAMS)
def test_a_feed_goes_on_from_any_batch(name: str, workers: int) -> None:
    feed, walked = feed_of(STREAMS[name](1, workers, 0.1)), []
    for epoch in (0, 1):
        for number, batch in enumerate(feed.batches(epoch), 1):
            walked.append((epoch, number, copy.deepcopy(feed.state_dict()), batch))
        assert feed.at_end
    ends = [sum(1 for entry in walked if entry[0] <= epoch) for epoch in (0, 1)]
    for stop in range(len(walked)):
        epoch, number, state, _ = walked[stop]
        expected = [entry[3] for entry in walked[stop + 1 : ends[epoch]]]
        if not expected:
            continue
        resumed = feed_of(STREAMS[name](1, 2 if stop == ends[0] + 1 else 0, 0.1))
        resumed.load_state_dict(state)
        assert same(list(resumed.batches(epoch, number)), expected), f"from epoch {epoch}, batch {number}"
        assert resumed.at_end
        assert differences(resumed.state_dict(), walked[ends[epoch] - 1][2]) == []


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("name", [name for name in ITERABLES if name not in ("shuffle buffer", "virtual shards")])
def test_an_iterable_gives_the_batches_of_plain_pytorch(name: str, workers: int) -> None:
    ours = list(feed_of(silent(name, workers)).batches(0))
    assert same(ours, list(silent(name, workers)))


def silent(name: str, workers: int) -> DataLoader[Any]:
    """Return a row of the table, drawing no random numbers."""
    loader: DataLoader[Any] = ITERABLES[name](1, workers, 0.0)
    dataset: Any = loader.dataset
    if hasattr(dataset, "sampler"):
        dataset.sampler = range(len(dataset.sampler))
    loader.collate_fn = default_collate if loader.batch_size is not None else loader.collate_fn
    return loader


def _three_resumes(kind: str, stream: Callable[[Path], Any], workers: int, folder: Path) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(stream(folder), 4, num_workers=workers)

    plain_loader: Any = loader()
    if hasattr(plain_loader.dataset, "set_epoch"):
        plain_loader.dataset.set_epoch(0)
    plain = [batch["x"].tolist() for batch in plain_loader]
    found, state = list[list[int]](), None
    for stop in (2, 7, 11, None):
        feed = feed_of(loader())
        if state is not None:
            feed.load_state_dict(state)
        batches = feed.batches(0, len(found))
        for batch in batches:
            found.append(batch["x"].tolist())
            if len(found) == stop:
                encoded = encode(feed.state_dict())
                state = decode(encoded.document, encoded.tensors)
                break
        batches.close()
    assert found == plain, f"{kind}, {workers} workers: {found} and by plain PyTorch {plain}"


def _every_stream(library: str | None, folder: str, most_by_one: int | None) -> None:
    streams = list((OPTIONAL[library] if library else PACKAGES).items())
    for workers, few in ((0, streams), (1, streams[:most_by_one]), (3, streams)):
        run = Path(folder, str(workers))
        run.mkdir()
        for kind, stream in few:
            _three_resumes(kind, stream, workers, run)


@pytest.fixture
def most_by_one(pytestconfig: pytest.Config) -> int | None:
    """Return how many streams of each library are read by a single worker, too: all with `--laws=all`."""
    return None if pytestconfig.getoption("--laws") == "all" else 1


def test_streams_of_libraries_lose_nothing_over_three_resumes(most_by_one: int | None, tmp_path: Path) -> None:
    # In one process of its own: to import these libraries takes seconds, and they leave threads and settings behind.
    assert run_ranks(_every_stream, None, str(tmp_path), most_by_one) == [0]


@pytest.mark.parametrize("library", OPTIONAL)
def test_streams_of_installed_libraries_lose_nothing(library: str, most_by_one: int | None, tmp_path: Path) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    assert run_ranks(_every_stream, library, str(tmp_path), most_by_one) == [0]
