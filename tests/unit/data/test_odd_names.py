"""Attributes of users' data whose names are like those of the engine's or of a loader's pass."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from midstride.engine.data.iterable.loader import IterableLoader
from midstride.engine.data.running_generator import keep_generators
from midstride.engine.objects.generator_search import held_objects

pytestmark = pytest.mark.fast


class Contents(IterableDataset[Any]):
    """A stream with an attribute called as a method of the engine's own streams."""

    def __init__(self) -> None:
        self.contents, self.position = [*range(40)], 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < len(self.contents):
            self.position += 1
            yield torch.tensor(self.position)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_a_stream_can_have_an_attribute_called_contents() -> None:
    loader = IterableLoader(DataLoader(Contents(), 2), name="train", key=1, limit=1.0, check_repeatability=True)
    assert next(loader.batches(0, 0)).tolist() == [1, 2]


def test_names_that_begin_like_that_of_a_pass_are_no_part_of_it() -> None:
    owner = SimpleNamespace(it=iter(DataLoader([1, 2])), items=SimpleNamespace(count=0))  # type: ignore[arg-type]
    assert {path for path in held_objects(owner) if path.startswith(".it")} == {".items"}


def test_a_generator_of_a_sampler_sees_variables_that_others_set() -> None:
    sampler, number = SimpleNamespace(), 0

    def draw() -> Iterator[int]:
        while True:
            yield number

    sampler.drawn = draw()
    keep_generators(sampler)
    number = 3
    assert next(sampler.drawn) == 3
