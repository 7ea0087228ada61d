"""Iterators come back to where they stood, and are described alike from there on."""

import itertools
from typing import Any

import pytest
import torch

from midstride.engine.objects.digest import digest_lines
from midstride.engine.objects.object_state import Objects
from midstride.engine.objects.roots import Root
from midstride.engine.state.codec import decode, encode
from midstride.engine.state.differences import differences

pytestmark = pytest.mark.fast


def objects_of(held: list[Any]) -> Objects:
    return Objects(lambda quiet: iter([Root("module", "", {"held": held})]), dict, torch.device("cpu"))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("items", [1, 2, 3])
def test_a_cycle_is_in_the_same_place_in_every_life(items: int, count: int) -> None:
    undisturbed, killed = ([itertools.cycle(["a", "b", "c"][:items])] for _ in range(2))
    for _ in range(9):
        read = [list(itertools.islice(held[0], count)) for held in (undisturbed, killed)]
        assert read[0] == read[1]
        saved, killed = encode(objects_of(killed).state_dict()), [itertools.cycle(["a", "b", "c"][:items])]
        objects_of(killed).load_state_dict(decode(saved.document, saved.tensors))
        assert differences(objects_of(killed).state_dict(), objects_of(undisturbed).state_dict()) == []


def test_an_iterator_is_described_by_its_remaining_items() -> None:
    left = iter([1, 2, 3])
    lines = {"held holds": "'2 items'", "held[0]": "3 items left", "held[1]": "builtins:list_iterator"}
    assert digest_lines("held", [left, type(left)]) == lines


def test_an_iterator_without_end_is_told_by_what_it_repeats() -> None:
    told = digest_lines("held", [itertools.repeat(2.0)])
    assert told == {"held holds": "'1 items'", "held[0] (0) holds": "'1 items'", "held[0] (0)[0]": "2.0"}
