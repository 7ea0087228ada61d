"""Every kind of object is described, written, read, restored, and then described in the same way again."""

import enum
import io
import itertools
import json
import logging
import selectors
import weakref
from array import array
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from datetime import datetime, time, timedelta, timezone
from fractions import Fraction
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pytest
import torch
import torch.fx
from sklearn.neighbors import KDTree
from sklearn.tree import DecisionTreeRegressor
from support.libraries import library
from torch import nn
from torch.amp import GradScaler
from torch.utils.data import TensorDataset

from midstride.engine.objects.kinds import table
from midstride.engine.objects.kinds.arrays import (
    Arrays,
    DataTypes,
    DerivedArrays,
    MaskedArrays,
    MemoryMaps,
    Numbers,
    Records,
    Scalars,
)
from midstride.engine.objects.kinds.blocks import Blocks
from midstride.engine.objects.kinds.containers import (
    ByteArrays,
    Deques,
    Dicts,
    Lists,
    NamedTuples,
    Proxies,
    Sets,
    Tuples,
)
from midstride.engine.objects.kinds.functions import Functions, Methods, Partials, WeakContainers, WeakReferences
from midstride.engine.objects.kinds.generators import Generators
from midstride.engine.objects.kinds.iterators import Counts, Cursors, Iterators
from midstride.engine.objects.kinds.kind import MISSING, Kind
from midstride.engine.objects.kinds.library_objects import (
    AttributeObjects,
    Graphs,
    LibraryObjects,
    Pipelines,
    Statefuls,
)
from midstride.engine.objects.kinds.opaque import LeftOut, Opaque
from midstride.engine.objects.kinds.plain import Addresses, Classes, Enums, Values
from midstride.engine.objects.kinds.reduced import Reduced
from midstride.engine.objects.kinds.tables import Tables
from midstride.engine.objects.kinds.tensors import FlippedTensors, ShardedTensors, Tensors, Views
from midstride.engine.objects.kinds.user_objects import DataSets, DerivedValues, UserObjects
from midstride.engine.objects.object_state import Objects
from midstride.engine.objects.restore import GraphRestore
from midstride.engine.objects.walk import GraphWalk
from midstride.engine.state.codec import decode, encode
from midstride.engine.state.differences import differences

augment = library("augment")


class Vector(np.ndarray):  # type: ignore[type-arg]
    """An array with attributes."""


class Tape(io.BytesIO):
    """A file in memory, with attributes."""


class Point(NamedTuple):
    x: int
    y: Any


Pair = namedtuple("Pair", "left right")  # one without types


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Number(int):
    """A number with attributes."""


class Group(frozenset):  # type: ignore[type-arg]
    """A set of objects that cannot change."""


class Stack(list):  # type: ignore[type-arg]
    """A list with attributes."""


class Part:
    """An object of the user's."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def step(self) -> int:
        self.count += 1
        return self.count


class Nowhere:
    """An object of a class that code has taken out of its module."""

    __module__: Any = None


def read_only(array: Any) -> Any:
    array.setflags(write=False)
    return array


class Doubling:
    """Has a function of its own."""

    def __init__(self) -> None:
        self.act = lambda value: 2 * value


def counting() -> Callable[[], int]:
    counts = [0]

    def count() -> int:
        counts[0] += 1
        return counts[0]

    return count


def transitions() -> Iterator[Any]:
    """Yield transitions, each of which begins with the array that the one before ends with."""
    state = np.zeros(3)
    for number in range(300):
        before, state = state, np.full(3, float(number))
        yield Point(before, (state, number, -0.0, number % 2 == 0, np.float32(number), "a", None))


EAST = timezone(timedelta(hours=5, minutes=30), "East")
ZONE = ZoneInfo("Europe/Berlin")


def masked(array: Any) -> None:
    array[0] = np.ma.masked
    array[1] = 7.0
    array.fill_value = -1.0


def frame() -> pd.DataFrame:
    """Return a table with a column of each type, of which only some are in Arrow's memory."""
    columns = {
        "number": [1, 2],
        "text": ["x", None],
        "object": [1, "a"],
        "category": pd.Categorical(["u", "v"], ordered=True),
        "maybe": pd.array([1, None], dtype="Int64"),
        "true": pd.array([True, None], dtype="boolean"),
        "day": pd.to_datetime(["2020", "2021"]),
        "hour": pd.to_datetime(["2020", "2021"]).tz_localize("Europe/Berlin"),
        "span": pd.to_timedelta(["1s", None]),
        "month": pd.period_range("2020", periods=2, freq="M"),
        "between": pd.interval_range(0, 2),
    }
    return pd.DataFrame(columns, index=pd.MultiIndex.from_tuples([(1, "a"), (2, "b")], names=["n", "t"]))


def rows_added(table: pd.DataFrame) -> None:
    table.loc[(1, "a"), "number"] = 5
    table["new"] = 1.5
    table.attrs["seen"] = [3]


#: name -> how it is built, how training changes it in place, what training sets there
TABLES: dict[str, tuple[Any, Any, Any]] = {
    "of all columns": (frame, rows_added, None),
    "made late": (lambda: None, lambda x: None, lambda _: frame().T),
    "of one array": (lambda: None, lambda x: None, lambda _: pd.DataFrame(np.arange(6.0).reshape(2, 3))),
    "a column": (lambda: pd.Series([1.0, 2.0], name="a"), lambda x: x.__setitem__(1, 5.0), None),
    "days": (lambda: None, lambda x: None, lambda _: pd.date_range("2020", periods=2, tz="UTC", name="t")),
    "categories": (lambda: pd.Categorical(["a"]), lambda x: None, lambda _: pd.Categorical(["b", "a"])),
    "a moment": (lambda: None, lambda x: None, lambda _: pd.Timestamp("2020", tz="UTC")),
}


def written(file: Any) -> None:
    file.seek(1)
    file.write(b"xyz")
    file.name = [1]


#: name -> how it is built, how training changes it in place, what training sets there
TAKEN_APART: dict[str, tuple[Any, Any, Any]] = {
    "a file in memory": (Tape, written, None),
    "a text in memory": (lambda: None, lambda x: None, lambda _: io.StringIO("a\nb")),
    "bits": (lambda: np.random.PCG64(1), lambda x: x.random_raw(), None),
    "bits made late": (lambda: None, lambda x: None, lambda _: [np.random.SFC64(1)]),
    "seeds": (lambda: np.random.SeedSequence(1), lambda x: x.spawn(2), None),
    "a tree": (lambda: None, lambda x: None, lambda _: DecisionTreeRegressor().fit(np.eye(3), [0.0, 2.0, 5.0]).tree_),
    "neighbors": (lambda: None, lambda x: None, lambda _: KDTree(np.eye(3))),
    "one that is linked": (augment.Cache, lambda x: [x.add("a"), x.add("b"), x.add("a")], None),
}


def leaf() -> torch.Tensor:
    tensor = torch.zeros(2, requires_grad=True)
    tensor.sum().backward()
    return tensor


def tagged(tensor: Any) -> Any:
    tensor.tag = [1]
    return tensor


def with_attribute(value: Any) -> Any:
    value.name = "b"
    return value


class Row(NamedTuple):
    """A value of a kind.

    Args:
        kind: the kind.
        build: makes it, as each attempt does.
        change: changes it in place.
        become: returns the value that training replaces it by, given the module's layer.
    """

    kind: type[Kind]
    build: Callable[[], Any]
    change: Callable[[Any], Any] = lambda value: None
    become: Callable[[nn.Linear], Any] | None = None


ROWS = {
    "a tensor": Row(Tensors, lambda: torch.zeros(2), lambda x: x.add_(1)),
    "a new tensor": Row(Tensors, lambda: None, become=lambda _: torch.ones(3)),
    "a gradient": Row(Tensors, leaf, lambda x: x.grad.add_(1)),
    "a tensor with an attribute": Row(Tensors, lambda: torch.zeros(2), lambda x: setattr(x, "tag", [1])),
    "a tensor without an attribute": Row(Tensors, lambda: tagged(torch.zeros(2)), lambda x: delattr(x, "tag")),
    "a view": Row(Views, lambda: None, become=lambda layer: layer.weight.data[0]),
    "a conjugate view": Row(FlippedTensors, lambda: torch.ones(2, dtype=torch.complex64).conj(), lambda x: x.add_(1j)),
    "a negative view": Row(
        FlippedTensors, lambda: None, become=lambda _: torch.ones(2, dtype=torch.cfloat).conj().imag
    ),
    "an array": Row(Arrays, lambda: np.zeros(2), lambda x: x.fill(3)),
    "a read-only array": Row(Arrays, lambda: np.zeros(2), lambda x: [x.fill(3), x.setflags(write=False)]),
    "an array that is writable now": Row(Arrays, lambda: read_only(np.zeros(2)), lambda x: x.setflags(write=True)),
    "an array in a weight": Row(Arrays, lambda: None, become=lambda layer: layer.weight.detach().numpy()[1, ::2]),
    "the bytes of a weight": Row(Views, lambda: None, become=lambda layer: layer.weight.data.view(torch.uint8)[1]),
    "an array of objects": Row(Arrays, lambda: np.array([[1], None], dtype=object), lambda x: x[0].append(2)),
    "an array in a file": Row(MemoryMaps, lambda: np.memmap(__file__, mode="r")),
    "an array that was in a file": Row(MemoryMaps, lambda: np.memmap(__file__, mode="r").copy(), lambda x: x.fill(3)),
    "a list": Row(Lists, lambda: [1, [2]], lambda x: x[1].append((3, x))),
    "a tuple": Row(Tuples, lambda: (1, [2]), lambda x: x[1].append(3)),
    "a named tuple": Row(NamedTuples, lambda: Point(1, [2]), become=lambda _: Point(5, [torch.ones(1)])),
    "a namedtuple": Row(NamedTuples, lambda: Pair(1, 2), become=lambda _: Pair([2], 3)),
    "a dict": Row(Dicts, lambda: {"a": 1}, lambda x: x.update({Color.RED: [2], (1, 2): 3})),
    "a dict of objects": Row(Dicts, dict, lambda x: x.update({Part(3): [Part(4)]})),
    "a dict made by a function": Row(Dicts, lambda: defaultdict(counting()), lambda x: [x["a"], x["b"]]),
    "a dict made by a class": Row(Classes, lambda: defaultdict(Part), lambda x: x["a"].step()),
    "a time": Row(Values, lambda: None, become=lambda _: time(3, fold=1, tzinfo=EAST)),
    "a time of a place": Row(Values, lambda: None, become=lambda _: datetime(2026, 1, 1, tzinfo=ZONE)),
    **{f"a table, {name}": Row(Tables, build, change, become) for name, (build, change, become) in TABLES.items()},
    "a set": Row(Sets, set, lambda x: x.update([5, 3, 1 << 40])),
    "a set of objects": Row(Sets, set, lambda x: x.update([(Color.RED, 2), Color.BLUE])),
    "a sparse tensor": Row(Tensors, lambda: torch.eye(2).to_sparse(), lambda x: x.mul_(3)),
    "a frozenset": Row(Sets, frozenset, become=lambda _: frozenset([7, 3])),
    "a deque": Row(Deques, lambda: deque([1], 2), lambda x: x.append([2])),
    "a bytearray": Row(ByteArrays, bytearray, lambda x: x.extend(b"abc")),
    "a value": Row(Values, lambda: range(3), become=lambda _: Fraction(1, 3)),
    "a logger": Row(Values, lambda: None, become=lambda _: logging.getLogger("a")),
    "an enum": Row(Enums, lambda: Color.RED, become=lambda _: Color.BLUE),
    "an address": Row(Addresses, lambda: None, become=id),
    "a dict by the ids of its values": Row(
        Dicts, dict, lambda x: x.update({id(part): part for part in (Part(1), Part(2))})
    ),
    "a row of records": Row(Records, lambda: np.zeros(2, dtype=[("a", "f4")])[0], lambda x: x.__setitem__("a", 3)),
    "a row made late": Row(Records, lambda: None, become=lambda _: np.ones(2, dtype=[("a", "f4")])[0]),
    "a function": Row(Functions, counting, lambda x: x()),
    "a function of each object": Row(UserObjects, Doubling, lambda x: setattr(x, "next", Doubling())),
    "a method": Row(Methods, lambda: Part().step, lambda x: x()),
    "a partial": Row(Partials, lambda: partial(counting(), 1, a=[2]), lambda x: x.keywords["a"].append(3)),
    "a weak reference": Row(WeakReferences, lambda: None, become=lambda layer: weakref.ref(layer.weight)),
    "a weak proxy": Row(WeakReferences, lambda: None, become=lambda layer: [weakref.proxy(layer)]),
    "a weak set": Row(WeakContainers, weakref.WeakSet, become=lambda layer: weakref.WeakSet([layer])),
    "a dict of weak keys": Row(WeakContainers, lambda: None, become=lambda x: weakref.WeakKeyDictionary({x: [1]})),
    "a dict of weak values": Row(WeakContainers, lambda: None, become=lambda x: weakref.WeakValueDictionary(a=x)),
    "a weak method": Row(WeakReferences, lambda: None, become=lambda x: weakref.WeakMethod(x.forward)),
    "a method that is gone": Row(WeakReferences, lambda: None, become=lambda _: weakref.WeakMethod(Part().step)),
    "a view of a dict": Row(Proxies, lambda: MappingProxyType({"a": [1]}), lambda x: x["a"].append(2)),
    "the items of a dict": Row(Proxies, lambda: None, become=lambda _: {"a": [1]}.items()),
    "a count": Row(Counts, lambda: itertools.count(3), next),
    "a cursor": Row(Cursors, lambda: iter([1, 2, 3]), next),
    "a cursor over a text": Row(Cursors, lambda: iter("abc"), next),
    "a cursor from the end": Row(Cursors, lambda: reversed([1, 2]), lambda x: [*x]),
    "an iterator": Row(Iterators, lambda: itertools.cycle([1, 2]), lambda x: [next(x) for _ in range(5)]),
    "a data set": Row(DataSets, lambda: TensorDataset(torch.zeros(2)), lambda x: x.tensors[0].add_(1)),
    "a generator": Row(Generators, lambda: np.random.default_rng(1), lambda x: [x.spawn(1), x.random()]),
    "a generator of torch": Row(Generators, torch.Generator, lambda x: x.manual_seed(3)),
    "a masked array": Row(MaskedArrays, lambda: np.ma.array([1.0, 2.0], mask=[0, 1]), masked),
    "an array without a mask": Row(MaskedArrays, lambda: np.ma.array([1, 2]), lambda x: x.__setitem__(0, 5)),
    "a hard mask": Row(MaskedArrays, lambda: None, become=lambda _: np.ma.array([1], mask=[1], hard_mask=True)),
    "an array of the user's": Row(DerivedArrays, lambda: np.zeros(2).view(Vector), lambda x: with_attribute(x).fill(3)),
    "a matrix": Row(DerivedArrays, lambda: None, become=lambda _: np.array([[1.0]]).view(np.matrix)),
    "records": Row(DerivedArrays, lambda: None, become=lambda _: np.rec.array([(1, 2.0)], names=["a", "b"])),
    "a data type": Row(DataTypes, lambda: np.dtype("f4"), become=lambda _: np.dtype([("a", ">i2"), ("b", "M8[s]")])),
    "a scalar": Row(Scalars, lambda: np.float32(1), become=lambda _: np.float64(2)),
    "numbers": Row(Numbers, lambda: array("d", [1]), lambda x: x.append(2.5)),
    "an object": Row(UserObjects, lambda: SimpleNamespace(a=[1]), with_attribute),
    "an object of a class without a module": Row(AttributeObjects, Nowhere, with_attribute),
    "an object made late": Row(UserObjects, lambda: None, become=lambda _: Part(3)),
    "a derived list": Row(UserObjects, Stack, lambda x: with_attribute(x).append([1])),
    "a derived number": Row(DerivedValues, Number, become=lambda _: with_attribute(Number(3))),
    "an object with a state": Row(Statefuls, lambda: GradScaler("cpu"), lambda x: x.load_state_dict(SCALED)),
    "an object of a library": Row(AttributeObjects, lambda: json.JSONEncoder(indent=2), with_attribute),
    "one that can be closed": Row(LibraryObjects, selectors.SelectSelector),
    **{f"taken apart, {name}": Row(Reduced, *rest) for name, rest in TAKEN_APART.items()},
    "a graph": Row(Graphs, lambda: torch.fx.symbolic_trace(nn.ReLU()).graph),
    "a constant": Row(Opaque, lambda: itertools),
    "a block": Row(Blocks, deque, lambda x: x.extend(transitions())),
    "a block of objects": Row(Blocks, list, lambda x: x.extend({"a": Part(n), "b": torch.ones(n)} for n in [5] * 300)),
    "a large value": Row(LeftOut, lambda: nested(70)),
}
SCALED = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "_growth_tracker": 1}
#: kinds with a test of their own
ELSEWHERE = {ShardedTensors: "tests/laws/objects/ranked.py", Pipelines: "tests/laws/stream_packages.py"}


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else None


class Holding(nn.Module):
    def __init__(self, build: Callable[[], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.held: Any = build()


@pytest.mark.parametrize("name", ROWS)
def test_a_kind_is_written_and_restored(name: str, caplog: pytest.LogCaptureFixture) -> None:
    row = ROWS[name]
    trained, resumed = Holding(row.build), Holding(row.build)
    objects = Objects.of_module(trained), Objects.of_module(resumed)
    built, place = resumed.held, objects[1].places().get(id(resumed.held))
    row.change(trained.held)
    if row.become is not None:
        trained.held = row.become(trained.layer)
    state = objects[0].state_dict()
    encoded = encode(state)
    read = decode(json.loads(json.dumps(encoded.document)), encoded.tensors)
    assert not differences(state, read)

    objects[1].load_state_dict(read)

    assert differences(state, objects[1].state_dict()) == []
    assert caplog.messages == []
    if place is not None and place == objects[0].places().get(id(trained.held)):
        assert resumed.held is built
    assert row.kind in kinds_of(trained.held, state["module"][""]["held"])


def test_items_of_a_block_share_what_they_shared() -> None:
    trained, resumed = Holding(deque), Holding(deque)
    objects = Objects.of_module(trained), Objects.of_module(resumed)
    trained.held.extend(transitions())
    trained.newest = trained.held[-1].y[0]

    objects[1].load_state_dict(objects[0].state_dict())

    held, newest = resumed.held, resumed.newest
    assert all(after.x is before.y[0] for before, after in itertools.pairwise(held))
    assert newest is held[-1].y[0]
    assert type(held[5].y[4]) is np.float32


def test_items_of_a_set_are_those_held_before_and_after_it() -> None:
    """The set is walked after one of its objects, and before the other ones."""
    for number in range(8):
        trained, resumed = Holding(set), Holding(set)
        objects = Objects.of_module(trained), Objects.of_module(resumed)
        parts = [Part(count) for count in range(number)]
        trained.held, trained.first, trained.last = {*parts}, parts[-1:], parts

        objects[1].load_state_dict(objects[0].state_dict())

        assert {*map(id, resumed.held)} == {*map(id, resumed.last)}
        assert [part.count for part in resumed.first] == [part.count for part in parts[-1:]]
        assert [part.count for part in resumed.last] == [*range(number)]


@pytest.mark.parametrize("is_built", [False, True])
def test_an_item_of_a_derived_set_is_shared_with_an_attribute(is_built: bool) -> None:
    trained, resumed = Holding(lambda: None), Holding(lambda: None)
    for module in (trained, resumed) if is_built else ():
        module.newest = Part(1)
        module.held = Group([module.newest])
    objects = Objects.of_module(trained), Objects.of_module(resumed)
    part = Part(5)
    trained.held, trained.newest = Group([part]), part

    objects[1].load_state_dict(objects[0].state_dict())

    assert [item.count for item in resumed.held] == [5]
    assert resumed.newest is next(iter(resumed.held))


@pytest.mark.parametrize("build", [dict, defaultdict, OrderedDict, UserDict, deque, list, SimpleNamespace])
def test_a_container_may_grow_while_it_is_read(build: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As another thread lets it grow."""
    module, numbers, read = Holding(build), itertools.count(), GraphWalk.node

    def add(value: object) -> None:
        held = vars(module.held) if build is SimpleNamespace else module.held
        held.append(value) if hasattr(held, "append") else held.update({f"x{next(numbers)}": value})

    def read_slowly(walk: GraphWalk, value: object, path: str) -> Any:
        if type(value) is Part and len(added) < 9:
            added.append(add(1))
        return read(walk, value, path)

    added: list[None] = []
    for count in (1, 2):
        add(Part(count))
    monkeypatch.setattr(GraphWalk, "node", read_slowly)

    Objects.of_module(module).state_dict()

    assert len(added) >= 2


def kinds_of(value: Any, node: Any) -> set[type]:
    """Return the kind of a value, and those that its node is restored by."""
    found: set[type] = {type(table.kind_of(type(value)))}
    if (kind := table.kind_of_node(node)) is not None:
        found.add(type(kind))
        for part in getattr(node, "state", {}).values():
            found |= kinds_of(None, part)
        if type(node) is list and len(node) == 1:
            found |= kinds_of(None, node[0])
    return found


def test_each_kind_has_a_row() -> None:
    assert {row.kind for row in ROWS.values()} | {*ELSEWHERE} == {*map(type, table.KINDS)}


class UserDicts(Kind):
    """`collections.UserDict`, by the dict that it wraps."""

    form = "user dict"
    types = (UserDict,)

    def describe(self, walk: GraphWalk, value: Any, path: str) -> Any:
        walk.meet(value, path)
        return self.instance(value, data=walk.node(value.data, f"{path}/data"))

    def restore(self, restore: GraphRestore, node: Any, live: Any, path: str) -> Any:
        target = live if restore.claim(live, path, fits=type(live) is UserDict) else restore.record(UserDict(), path)
        target.data = restore.value(node.state["data"], target.data, f"{path}/data")
        return target


def test_a_new_kind_is_one_class_and_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (UserDicts(), *table.KINDS)
    monkeypatch.setattr(table, "KINDS", rows)
    monkeypatch.setattr(table, "_DESCRIBERS", {})
    monkeypatch.setattr(table, "_OF_NODES", table.kinds_of_nodes(rows))
    value, live = UserDict(a=[1]), UserDict(a=[0])

    node = GraphWalk({}, {}).node(value, "x")
    found = GraphRestore(GraphWalk({}, {}), {}, torch.device("cpu")).value(node, live, "x")

    assert (node.form, found, found is live) == ("user dict", value, True)
    assert GraphRestore(GraphWalk({}, {}), {}, torch.device("cpu")).value(node, MISSING, "x") == value
