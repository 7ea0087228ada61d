"""The codec: what is encoded comes back, or is refused with its path."""

import collections
import copy
import itertools
import math
import struct
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.codec_round_trip import through_files
from torch import nn

from midstride.engine.errors import UnsupportedState
from midstride.engine.state.codec import encode
from midstride.engine.state.differences import differences

ODD_NAN = struct.unpack(">d", bytes.fromhex("fff8000000000003"))[0]


VALUES: dict[str, Any] = {
    "none": None,
    "bools": [True, False],
    "ints": [0, -1, 2**200],
    "floats": [0.1, -0.0, 1e-320, math.inf, -math.inf, math.nan, ODD_NAN],
    "complex": complex(-0.0, math.inf),
    "text": ["", "é\n\0", "\udce9", "$"],
    "bytes": [b"", b"\xff\0", bytearray(b"ab")],
    "tuples": ((), (1,), (1, [2, (3,)])),
    "sets": [set(), {1, 2}, frozenset({(1, 2), "a"})],
    "int keys": {1: "a", 2: {3: 4}, -1: None},
    "mixed keys": {1: "int", "1": "text", (1, 2): "tuple", None: 0, True + 1: 2, 0.5: math.inf, b"k": 1},
    "tag key": {"$": "tuple", "items": [1]},
    "counter": Counter({3: 1, 9: 2}),
    "ordered": OrderedDict([("b", 1), (1, 2)]),
    "defaultdicts": [defaultdict(None, {1: 2}), defaultdict(dict, {"a": {}}), defaultdict(list), defaultdict(Counter)],
    "deques": [deque([1, (2,)], maxlen=5), deque([1, 2]), deque(maxlen=0)],
    "torch": [torch.float32, torch.bool, torch.device("cpu"), torch.device("cuda:3"), torch.Size([2, 0])],
    "arrays": [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(-0.0, dtype=np.float32),
        np.zeros((0, 3), dtype=np.uint16),
        np.arange(3, dtype=">i4"),
        np.array(["ab", "c"]),
        np.array([b"x"]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8", (2,))]),
        np.array([1 + 2j]),
        np.arange(10)[::3],
        np.random.RandomState(3).get_state()[1],
    ],
    "scalars": [
        np.float32(0.1), np.float64(math.nan), np.int8(-3), np.bool_(True), np.str_("é"), np.bytes_(b"x"),
        np.complex64(1j), np.float16(-0.0), np.datetime64("2020-01-01T00:00"), np.timedelta64(3, "s"),
        np.uint64(2**64 - 1),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", list(VALUES))
def test_a_value_comes_back_as_it_was(name: str):
    back = through_files({"it": VALUES[name]})["it"]
    assert differences(VALUES[name], back) == []
    assert repr(back) == repr(VALUES[name])


def test_order_of_keys_and_memory_order_of_arrays_are_kept():
    array = np.asfortranarray(np.random.RandomState(0).rand(3, 4))
    back = through_files({"b": 1, "a": array, "t": np.arange(24).reshape(2, 3, 4).T})
    assert list(back) == ["b", "a", "t"]
    assert back["a"].flags.f_contiguous
    assert back["t"].strides == np.arange(24).reshape(2, 3, 4).T.strides
    assert back["a"].flags.writeable


#: a container, and what is done to it once it is back
CONTAINERS: list[tuple[Any, Callable[[Any], object]]] = [
    ([1, "a"], lambda it: it.append(2)),
    ([(), 1.5], lambda it: it.append(2)),
    ({"a": 1}, lambda it: it.update(b=2)),
    ({1: [2]}, lambda it: it[1].append(3)),
    ({1, 2}, lambda it: it.add(3)),
    (deque([1]), lambda it: it.append(2)),
    (bytearray(b"a"), lambda it: it.extend(b"b")),
    (defaultdict(list, {"a": [1]}), lambda it: it["b"]),
    (OrderedDict(a=1, b=2), lambda it: it.pop("a")),
    (Counter({3: 1}), lambda it: it.update([3])),
    (np.zeros(2), lambda it: it.fill(1)),
]


@pytest.mark.parametrize(("it", "change"), CONTAINERS, ids=lambda value: type(value).__name__)
def test_a_shared_container_is_restored_as_one(it: Any, change: Callable[[Any], object]):
    tree = {"first": {"a/b": [it]}, "alike": copy.deepcopy(it), "second": (0, {2: it}), "third": it}
    back = through_files(tree)
    assert differences(tree, back) == []
    change(back["third"])
    assert back["first"]["a/b"][0] is back["second"][1][2] is back["third"]
    assert differences(tree["alike"], back["alike"]) == []
    assert differences(tree["third"], back["third"])


def test_temporary_containers_are_not_confused():
    kinds = [np.dtype([(f"field {number}", "i4")]) for number in range(20)]
    back = through_files({"arrays": [np.zeros(1, kind) for kind in kinds]})
    assert [array.dtype for array in back["arrays"]] == kinds


_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
    | st.sampled_from([np.float32(1.5), np.int64(3), torch.float16, torch.Size([1, 2])])
)


_keys = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text())


_tensor_leaves = st.builds(
    lambda shape, dtype, flip: (
        torch.arange(math.prod(shape)).reshape(shape).to(dtype).permute(tuple(range(len(shape))[::flip]))
    ),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.int64]),
    st.sampled_from([1, -1]),
)


_trees = st.recursive(
    _scalars | _tensor_leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.lists(inner, max_size=4).map(lambda items: deque(items, maxlen=6))
        | st.dictionaries(_keys, inner, max_size=4)
        | st.dictionaries(_keys, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(_keys, inner, max_size=4).map(lambda items: defaultdict(list, items))
        | st.sets(_keys, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150)
@given(_trees)
def test_any_nest_comes_back(tree: Any):
    assert differences(tree, through_files(tree)) == []


class Tracker:
    """A type the codec does not know."""


Point = collections.namedtuple("Point", "x y")


def _quietly(make: Callable[[], Any]) -> Any:
    """Return what torch makes with a warning: of something deprecated, or in beta."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


REFUSED: dict[str, tuple[Any, str]] = {
    "object": (Tracker(), "Tracker"),
    "lambda": (lambda epoch: 1.0, "function"),
    "method": ([].append, "method"),
    "named tuple": (Point(1, 2), "Point"),
    "subclass": (type("Own", (dict,), {})(), "Own"),
    "generator": (torch.Generator(), "torch._C.Generator"),
    "module": (nn.Linear(1, 1), "Linear"),
    "iterator": (itertools.count(), "itertools.count"),
    "object array": (np.array([{}], dtype=object), "object"),
    "factory": (defaultdict(lambda: 1), "defaultdict"),
    "graph": (torch.ones(1, requires_grad=True) * 2, r"\.detach\(\)"),
    "meta": (torch.empty(2, device="meta"), "a meta tensor of torch.float32"),
    "quantised": (
        _quietly(lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)),
        "a quantised tensor of torch.qint8",
    ),
    "nested": (_quietly(lambda: torch.nested.nested_tensor([torch.ones(2)])), "a nested tensor of torch.float32"),
    "compressed rows": (_quietly(lambda: torch.eye(3).to_sparse_csr()), "a sparse_csr tensor of torch.float32"),
    "key": ({torch.ones(1): 1}, "a tensor as a key"),
    "key object": ({Tracker(): 1}, "Tracker"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_an_unknown_type_is_refused_by_its_path(name: str):
    value, words = REFUSED[name]
    with pytest.raises(UnsupportedState, match=rf"(?s)callbacks/0/it.*{words}.*state_dict\(\)"):
        encode({"callbacks": [{"it": value}]})


def test_all_faults_are_named_at_once():
    with pytest.raises(UnsupportedState) as caught:
        encode({"a": Tracker(), "b": [1, lambda: 0], "c": {"d": Tracker()}})
    lines = str(caught.value).splitlines()
    assert lines[0] == "3 values of the state cannot be written:"
    assert [line.split(":")[0].strip() for line in lines[1:4]] == ["a", "b/1", "c/d"]


def test_what_contains_itself_is_refused():
    loop: list[Any] = [1]
    loop.append(loop)
    with pytest.raises(UnsupportedState, match="loop/1: list that contains itself"):
        encode({"loop": loop})
    shared = [1]
    assert through_files([shared, shared]) == [[1], [1]]
