"""`assert_resumes_exactly`: silent about what is exact, and right about what is not."""

import copy
import itertools
import os
import random
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from midstride.engine import DataModule, TrainingModule
from midstride.engine.testing import assert_resumes_exactly
from midstride.engine.testing.child_run import NondeterminismTracer

CALLS = [0]


class Plain(TrainingModule):
    """Exact; the others add to its loss what is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def factor(self) -> float:
        return 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.layer(batch).square().mean() * self.factor()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.layer(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Counted(Plain):
    """Exact: an attribute belongs to a snapshot."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = 0
        self._factors = itertools.count(1)

    def factor(self) -> float:
        self.counter += 1
        return 1.0 + self.counter + next(self._factors)


class OfClass(Plain):
    count = 0

    def factor(self) -> float:
        OfClass.count += 1
        return 1.0 + OfClass.count


class Global(Plain):
    def factor(self) -> float:
        CALLS[0] += 1
        return 1.0 + CALLS[0]


class Clocked(Plain):
    def factor(self) -> float:
        return time.time() % 7


class Unique(Plain):
    def factor(self) -> float:
        return 1.0 + uuid.uuid4().int % 97


class Cycling(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.factors = (number for number in range(1, 100))

    def factor(self) -> float:
        return float(next(self.factors))


class Opened(Plain):
    """Counts in a file."""

    def __init__(self) -> None:
        super().__init__()
        self.file = Path(__file__).open("rb")  # noqa: SIM115 (until the process ends)

    def factor(self) -> float:
        return float(self.file.read(1)[0])


class OwnGenerator(Plain):
    """Exact: generators that a module holds belong to a snapshot."""

    def __init__(self) -> None:
        super().__init__()
        self.numpy = np.random.default_rng(0)
        self.random = random.Random(0)
        self.torch = torch.Generator().manual_seed(0)

    def factor(self) -> float:
        return 1.0 + self.numpy.random() + self.random.random() + float(torch.rand((), generator=self.torch))


class Rows(Dataset[Tensor]):
    def __init__(self) -> None:
        self.rows = torch.randn(24, 2, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index] + 0.1 * torch.randn(2)


class FromSystem(Rows):
    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index] + os.urandom(1)[0] / 255


class Reading(Rows):
    def __init__(self) -> None:
        super().__init__()
        path = Path("bytes")
        path.write_bytes(bytes(range(256)))
        self.file = path.open("rb", buffering=0)

    def __getitem__(self, index: int) -> Tensor:
        if self.file.tell() > 200:
            self.file.seek(0)
        return self.rows[index] + self.file.read(1)[0]


class Streamed(Rows):
    """Gives what comes next, whatever it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.stream: Iterator[Tensor] = iter(dict(enumerate([*self.rows] * 4)).values())

    def __getitem__(self, index: int) -> Tensor:
        return next(self.stream)


class Cached(Rows):
    """Draws when a sample is first read, and keeps it on the class."""

    cache: ClassVar[dict[int, Tensor]] = {}

    def __getitem__(self, index: int) -> Tensor:
        if index not in self.cache:
            self.cache[index] = torch.randn(2)
        return self.cache[index]


class Pipeline:
    """As `torchdata.nodes.Loader`: begins to read when asked for a state, holds a Python module, counts resumes."""

    __module__ = "torchdata.nodes.loader"

    def __init__(self) -> None:
        self.context, self.rows = torch.multiprocessing, Rows().rows
        self.at, self.resumes = 0, 0
        self.reading: Iterator[Tensor] | None = None

    def __iter__(self) -> Iterator[Tensor]:
        self.reading = self.rest()
        return self.reading

    def rest(self) -> Iterator[Tensor]:
        first = self.at % len(self.rows)
        self.at = first
        for row in self.rows[first:]:
            self.at += 1
            yield row

    def state_dict(self) -> dict[str, int]:
        if self.reading is None:
            iter(self)
        return {"at": self.at, "resumes": self.resumes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.resumes = state["at"], state["resumes"] + 1


class Piped(IterableDataset[Tensor]):
    """Reads a pipeline, again in each epoch."""

    def __init__(self) -> None:
        self.pipeline = Pipeline()

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.pipeline


class PipedWithState(Piped):
    """Gives the pipeline's state for its own."""

    def state_dict(self) -> dict[str, int]:
        return self.pipeline.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.pipeline.load_state_dict(state)


class Data(DataModule):
    def __init__(self, dataset: Dataset[Tensor], workers: int = 0) -> None:
        self.dataset, self.workers = dataset, workers

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.dataset, 4, shuffle=True, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Rows(), 4)


@pytest.mark.parametrize("module", [Plain, Counted, OwnGenerator])
def test_what_is_exact_passes_and_leaves_this_process_as_it_was(module: type[Plain]) -> None:
    states = torch.get_rng_state(), random.getstate()
    assert_resumes_exactly(module, Data(Rows(), workers=2 if module is Plain else 0))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()


@pytest.mark.parametrize("stream", [Piped, PipedWithState])
def test_a_pipeline_that_a_stream_holds_resumes(stream: type[Piped]) -> None:
    assert_resumes_exactly(Plain, lambda: DataLoader(stream(), 4))


def test_a_module_may_be_given_as_it_is_and_bring_its_loader() -> None:
    module = Counted()
    before = module.layer.weight.clone()
    assert_resumes_exactly(module, DataLoader(Rows(), 4), accumulate_grad_batches=2, steps=4)
    assert module.counter == 0
    assert torch.equal(module.layer.weight, before)


WRONG: dict[type[Plain], list[str]] = {
    OfClass: [r"class OfClass: count: 5 resumed, 6 undisturbed"],
    Global: [r"global \S*test_resume_check\.CALLS\[0\]: 5 resumed, 6 undisturbed"],
    Clocked: [r"time\.time\(\) in Clocked\.factor \(test_resume_check\.py:\d+\)", "repeated without an interruption"],
    Unique: [r"os\.urandom\(\) in Unique\.factor"],
    Cycling: ["The engine warned:\n.*factors, a generator, is not part of snapshots"],
    Opened: [r"module\.file: at byte 5 resumed, at byte 6 undisturbed", "The engine warned:\n.*file, a BufferedReader"],
}


@pytest.mark.parametrize("module", WRONG)
def test_a_wrong_module_is_told_what_is_wrong_with_it(module: type[Plain]) -> None:
    with pytest.raises(AssertionError) as raised:
        assert_resumes_exactly(module, Data(Rows()))
    for pattern in (r"resumed after step 1 \(at a step\)", r"module\.layer\.weight", *WRONG[module]):
        assert re.search(f"(?s){pattern}", str(raised.value)), raised.value


DATA: dict[type[Rows], list[str]] = {
    FromSystem: [r"os\.urandom\(\) in FromSystem\.__getitem__", "repeated without an interruption"],
    Reading: [r"data\.dataset\.file: at byte \d+ resumed, at byte \d+ undisturbed"],
    Cached: [r"class Cached: cache\[\d+\]: missing resumed, float32\[2\] \w+ undisturbed"],
    Streamed: [r"data\.dataset\.stream: \d+ items left resumed, \d+ items left undisturbed"],
}


@pytest.mark.parametrize("dataset", DATA)
def test_wrong_data_are_told_by_the_sample(dataset: type[Rows]) -> None:
    with pytest.raises(AssertionError) as raised:
        assert_resumes_exactly(Plain, lambda: Data(dataset()), rng="batch")
    for pattern in (r"sample \d+ in batch (1 of epoch 0|0 of epoch 1) differs", *DATA[dataset]):
        assert re.search(f"(?s){pattern}", str(raised.value)), raised.value


def test_what_the_engine_refuses_is_told_in_its_words() -> None:
    with pytest.raises(AssertionError, match=r"(?s)does not train to the end of the check.*FromSystem"):
        assert_resumes_exactly(Plain, lambda: Data(FromSystem()))


def test_a_module_that_does_not_train_shows_its_error() -> None:
    class Failing(Plain):
        def factor(self) -> float:
            raise KeyError("no such factor")

    with pytest.raises(AssertionError, match=r"(?s)does not train to the end.*no such factor"):
        assert_resumes_exactly(Failing, Data(Rows()))


def test_a_copy_asks_for_no_id() -> None:
    with NondeterminismTracer() as witness:
        copy.deepcopy([[1], {2: []}])
    assert witness.calls == []

    with NondeterminismTracer() as witness:
        id(witness)
    assert [line.partition(" in ")[0] for line in witness.calls] == ["id()"]
