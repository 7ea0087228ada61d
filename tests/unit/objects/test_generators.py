"""Generators that data hold are found where a reader of the code would find them."""

import random
from collections import deque
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from midstride.engine.objects.digest import digest_lines
from midstride.engine.objects.generator_search import find_generators
from midstride.engine.objects.kinds.generators import get_state, seeder, set_state
from midstride.engine.state.codec import decode, encode
from midstride.engine.state.differences import differences

GLOBAL = np.random.default_rng(1)


class Plain(Dataset[int]):
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return index


class ByGlobal(Plain):
    def __getitem__(self, index: int) -> int:
        return index + int(GLOBAL.integers(3))


def closed_over(generator: Any) -> Any:
    return lambda x: x + generator.random()


def drawing(x: float, generator: Any) -> float:
    return x + float(generator.random())


def rolled(x: int) -> int:
    return x + int(GLOBAL.integers(3))


class ByHelper(Plain):
    """Its helpers draw: a function, a method, a static one, another class."""

    def __getitem__(self, index: int) -> int:
        return rolled(index)


class ByMethod(Plain):
    def __getitem__(self, index: int) -> int:
        return self._shifted(index)

    def _shifted(self, index: int) -> int:
        return self._rolled(index) + 1

    @staticmethod
    def _rolled(index: int) -> int:
        return index + int(GLOBAL.integers(3))


class ByClass(Plain):
    rng = random.Random(2)

    def __getitem__(self, index: int) -> int:
        return index + self.rng.randrange(3)


class Noise:
    def __call__(self, x: int) -> int:
        return x + int(GLOBAL.integers(3))


class MadeAnew(Plain):
    def __getitem__(self, index: int) -> int:
        return Noise()(index)


TABLE = {"noise": [GLOBAL]}


class ByTable(Plain):
    def __getitem__(self, index: int) -> int:
        return sum(int(one.integers(3)) for one in TABLE["noise"])


class Streamed(Plain):
    def __iter__(self) -> Any:
        yield rolled(1)


class Slotted:
    __slots__ = ("rng",)

    def __init__(self, rng: Any) -> None:
        self.rng = rng


class Reseeded(Plain):
    def reseed(self, seed: int) -> None:
        self.seed = seed


GENERATOR = random.Random(1)
HOLDERS: dict[str, tuple[Any, list[str]]] = {
    "nothing": (Plain(a=1, b=[torch.ones(2)]), []),
    "an attribute": (Plain(rng=GENERATOR), ["rng"]),
    "a list of transforms": (Plain(transforms=[Plain(rng=GENERATOR)]), ["transforms[0].rng"]),
    "a wrapped data set": (Subset(Plain(rng=GENERATOR), [0]), ["dataset.rng"]),
    "several": (Plain(a=torch.Generator(), b=GENERATOR), ["a", "b"]),
    "data sets in a row": (ConcatDataset([Plain(rng=GENERATOR)]), ["datasets[0].rng"]),
    "a global": (ByGlobal(), ["__getitem__ (global GLOBAL)"]),
    "a closure": (Plain(transform=closed_over(GENERATOR)), ["transform (its generator)"]),
    "a partial": (Plain(transform=partial(drawing, generator=GENERATOR)), ["transform.keywords['generator']"]),
    "a hook": (Plain(inner=Reseeded(rng=GENERATOR)), ["inner"]),
    "a global of a helper": (ByHelper(), ["__getitem__ (global rolled) (global GLOBAL)"]),
    "a global of a method": (ByMethod(), ["_rolled (global GLOBAL)"]),
    "a class attribute": (ByClass(), [" (class attribute rng)"]),
    "an object made anew": (MadeAnew(), ["__getitem__ (global Noise).__call__ (global GLOBAL)"]),
    "a table of the module": (ByTable(), ["__getitem__ (global TABLE)['noise'][0]"]),
    "an iterable's": (Streamed(), ["__iter__ (global rolled) (global GLOBAL)"]),
    "a deque": (Plain(queue=deque([GENERATOR])), ["queue[0]"]),
    "slots": (Plain(inner=Slotted(GENERATOR)), ["inner.rng"]),
    "a long list": (Plain(many=[*[None] * 999, GENERATOR]), ["many[999]"]),
    "a long list of objects": (Plain(many=[*[Plain() for _ in range(999)], Plain(rng=GENERATOR)]), ["many[999].rng"]),
    "data": (Plain(many=[(1, "a")] * 1000, more=[[1.0]] * 1000), []),
    "the main ones": (Plain(a=torch.default_generator, b=np.random.mtrand._rand, c=random._inst), []),  # type: ignore[attr-defined]
    "the system's": (Plain(rng=random.SystemRandom()), []),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_generators_are_found(name: str) -> None:
    owner, paths = HOLDERS[name]
    assert list(find_generators(owner)) == paths


def test_what_is_beside_is_left_out() -> None:
    dataset = Plain(rng=GENERATOR)
    assert not find_generators(Plain(data_source=dataset), beside=dataset)


GENERATORS = [
    torch.Generator(),
    np.random.default_rng(1),
    np.random.Generator(np.random.Philox(1)),
    np.random.RandomState(1),
    random.Random(1),
]


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda generator: type(generator).__name__)
def test_a_generator_is_seeded_and_put_back(generator: Any) -> None:
    def drawn() -> list[float]:
        if isinstance(generator, torch.Generator):
            return torch.rand(3, generator=generator).tolist()  # type: ignore[no-any-return]
        return [float(generator.random()) for _ in range(3)]

    for seed in (0, 2**64 - 1):
        seeder(generator)(seed)
        first = drawn()
        seeder(generator)(seed)
        assert drawn() == first
    encoded = encode(get_state(generator))
    following = drawn()
    set_state(generator, decode(encoded.document, encoded.tensors))
    assert not differences(following, drawn())


def test_the_main_generators_are_no_state_beside_a_snapshot() -> None:
    assert [*digest_lines("held", [torch.default_generator, random._inst])] == ["held holds"]  # type: ignore[attr-defined]
    assert [*digest_lines("held", [torch.Generator(), random.Random(1)])] == ["held holds", "held[0]", "held[1]"]
