"""The hash table of a set is made anew: the two iterate alike, and go on alike, whatever becomes of them."""

import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from midstride.engine.state.codec import decode, encode
from midstride.engine.state.hash_table import HashTable, described_table, fill_set, is_as_described

#: what a set is of -> one such item
ITEMS: dict[str, Callable[[random.Random], Any]] = {
    "large numbers": lambda draw: draw.randrange(1 << 40),
    "small numbers": lambda draw: draw.randrange(300),
    "numbers that collide": lambda draw: draw.randrange(50) * 64,
    "fractions": lambda draw: draw.random(),
    "pairs": lambda draw: (draw.randrange(100), draw.random()),
}
#: what is done to a set
CHANGES: list[Callable[[set[Any], list[Any], random.Random], object]] = [
    lambda items, new, draw: items.update(new),
    lambda items, new, draw: items.update(set(new)),
    lambda items, new, draw: items.update(dict.fromkeys(new)),
    lambda items, new, draw: items.update(set(list(items)[: len(new)])),  # makes it larger, and adds nothing
    lambda items, new, draw: items.difference_update([item for item in items if draw.random() < 0.4]),
    lambda items, new, draw: items.difference_update({item for item in items if draw.random() < 0.4}),
    lambda items, new, draw: items.intersection_update({item for item in items if draw.random() < 0.8}),
    lambda items, new, draw: [items.pop() for _ in range(min(len(items), len(new)))],
    lambda items, new, draw: [items.discard(item) for item in list(items)[:: draw.randrange(1, 4)]],
    lambda items, new, draw: [items.add(items.pop()) for _ in range(min(len(items), 3))],
]


def changed(items: set[Any], kind: str, draw: random.Random, times: int) -> set[Any]:
    for _ in range(times):
        new = [ITEMS[kind](draw) for _ in range(draw.randrange(1, 60))]
        draw.choice(CHANGES)(items, new, draw)
    return items


@pytest.mark.parametrize("kind", ITEMS)
def test_a_set_made_anew_goes_on_as_the_other(kind: str) -> None:
    described = 0
    for seed in range(100):
        draw = random.Random(seed)
        one, other = changed(set(), kind, draw, draw.randrange(12)), changed(set(), "small numbers", draw, 3)
        table = described_table(one, list(one)).get("table")
        described += table is not None
        assert fill_set(other, list(one), table)
        assert is_as_described(other, list(one), table)
        for number in range(8):
            for items in (one, other):
                changed(items, kind, random.Random(number), 1)
            assert list(one) == list(other), (kind, seed, number)
    assert described > 50, "few sets that only grow have a table of their own"


@pytest.mark.parametrize("seed", range(3))
def test_a_set_of_many_is_made_anew_and_read_back(seed: int) -> None:
    draw = random.Random(seed)
    items = {draw.randrange(1 << 40) for _ in range(20_000)}
    items.difference_update(list(items)[::3])
    [items.pop() for _ in range(500)]
    encoded = encode({"of": items})
    assert "table" in encoded.document["of"]
    found = decode(encoded.document, encoded.tensors)["of"]
    assert list(found) == list(items)
    assert [found.pop() for _ in range(100)] == [items.pop() for _ in range(100)]


def test_a_table_is_kept_where_another_process_can_make_it() -> None:
    texts = {str(number) for number in range(50)}
    [texts.pop() for _ in range(20)]
    with patch.dict("os.environ", PYTHONHASHSEED="random"):
        assert not described_table(texts, list(texts)), "every process hashes text otherwise"
    with patch.dict("os.environ", PYTHONHASHSEED="0"):
        table = described_table(texts, list(texts))["table"]
    found: set[Any] = set()
    assert fill_set(found, list(texts), table)
    assert HashTable.of(found) == HashTable.of(texts)
    assert not described_table(frozenset(texts), list(texts)), "which does not change"


def test_a_set_that_only_grew_needs_no_table() -> None:
    assert not described_table(set(range(1000)), list(range(1000)))
    assert not described_table(set(), [])


#: what a snapshot from anywhere may say of three items
WRONG: dict[str, dict[str, Any]] = {
    "other hashes": {"slots": [0, 1, 2]},
    "without end": {"size": 1 << 60},
    "no power of 2": {"size": 12},
    "text": {"size": "8"},
    "no slots": {"slots": None},
    "slots of text": {"slots": ["0", "3", "4"]},
    "too few": {"slots": [0]},
    "one slot twice": {"slots": [3, 3, 4]},
    "outside": {"slots": [3, 4, 8]},
    "before": {"removed": [-1]},
    "far on": {"finger": 1 << 60},
    "not yet": {"finger": -1},
}


@pytest.mark.parametrize("case", WRONG)
def test_without_its_table_a_set_has_its_items(case: str) -> None:
    items = {3, 4, 5}
    right: dict[str, Any] = {"size": 8, "slots": [3, 4, 5], "removed": [6], "finger": 7}
    found: set[Any] = {9}
    assert fill_set(found, list(items), right)
    assert HashTable.of(found) == HashTable(**right)
    assert not fill_set(found, list(items), right | WRONG[case])
    assert found == items
