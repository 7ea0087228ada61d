"""The codec: what goes in comes out, bit for bit, or is refused by its path."""

import collections
import importlib
import inspect
import itertools
import json
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
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from midstride.engine.errors import UnsupportedState
from midstride.engine.state.codec import decode, differences, encode

STEPS_BEFORE, STEPS_AFTER = 7, 20


@pytest.fixture(scope="module", autouse=True)
def _torch_is_warm() -> None:
    """Let torch import its compiler, as the first step of some optimizers does: it sets an environment variable."""
    importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    Training(torch.optim.ASGD, {}).step(0)


def through_files(tree: Any) -> Any:
    """Take `tree` to the bytes of the two files and back."""
    encoded = encode(tree)
    text, data = json.dumps(encoded.document, allow_nan=False).encode(), save(encoded.tensors)
    return decode(json.loads(text), load(data))


# --- every optimizer and every scheduler of torch -------------------------------------------------------------------

OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.ASGD, {"lr": 0.1, "t0": 3, "lambd": 0.1}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Adagrad, {"lr_decay": 0.1}),
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"amsgrad": True, "foreach": True}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.Adam, {"lr": torch.tensor(0.01)}),
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.Adamax, {}),
    (torch.optim.LBFGS, {"max_iter": 3, "history_size": 4}),
    (torch.optim.LBFGS, {"max_iter": 3, "line_search_fn": "strong_wolfe"}),
    (torch.optim.Muon, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.SparseAdam, {}),
]


def _halve(epoch: int) -> float:
    return 0.5**epoch


class _Warmup:
    """A schedule that is an object, whose attributes LambdaLR saves."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, epoch: int) -> float:
        self.steps += epoch % 2
        return 1 / self.steps


SCHEDULERS: list[tuple[type[schedulers.LRScheduler], Any]] = [
    (schedulers.ChainedScheduler, lambda opt: schedulers.ChainedScheduler(_two(opt))),
    (schedulers.ConstantLR, lambda opt: schedulers.ConstantLR(opt, total_iters=10)),
    (schedulers.CosineAnnealingLR, lambda opt: schedulers.CosineAnnealingLR(opt, 9)),
    (schedulers.CosineAnnealingWarmRestarts, lambda opt: schedulers.CosineAnnealingWarmRestarts(opt, 4, 2)),
    (schedulers.CyclicLR, lambda opt: schedulers.CyclicLR(opt, 0.01, 0.1, 5)),
    (schedulers.CyclicLR, lambda opt: schedulers.CyclicLR(opt, 0.01, 0.1, 5, scale_fn=lambda x: 0.9**x)),
    (schedulers.ExponentialLR, lambda opt: schedulers.ExponentialLR(opt, 0.9)),
    (schedulers.LambdaLR, lambda opt: schedulers.LambdaLR(opt, lambda epoch: 0.9**epoch)),
    (schedulers.LambdaLR, lambda opt: schedulers.LambdaLR(opt, _Warmup(3))),
    (schedulers.LinearLR, lambda opt: schedulers.LinearLR(opt, total_iters=15)),
    (schedulers.MultiStepLR, lambda opt: schedulers.MultiStepLR(opt, [3, 9, 9, 15])),
    (schedulers.MultiplicativeLR, lambda opt: schedulers.MultiplicativeLR(opt, _halve)),
    (schedulers.OneCycleLR, lambda opt: schedulers.OneCycleLR(opt, 0.1, total_steps=40)),
    (schedulers.PolynomialLR, lambda opt: schedulers.PolynomialLR(opt, 18, 2.0)),
    (schedulers.ReduceLROnPlateau, lambda opt: schedulers.ReduceLROnPlateau(opt, patience=2, cooldown=1)),
    (schedulers.ReduceLROnPlateau, lambda opt: schedulers.ReduceLROnPlateau(opt, "max", patience=1)),
    (schedulers.SequentialLR, lambda opt: schedulers.SequentialLR(opt, _two(opt), [11])),
    (schedulers.StepLR, lambda opt: schedulers.StepLR(opt, 4)),
    (SWALR, lambda opt: SWALR(opt, 0.001, anneal_epochs=12)),
]


def _two(opt: torch.optim.Optimizer) -> list[schedulers.LRScheduler]:
    return [schedulers.LinearLR(opt, 0.1, total_iters=6), schedulers.MultiStepLR(opt, [2, 8])]


def _shipped(module: Any, base: type) -> set[type]:
    classes = {kind for name, kind in vars(module).items() if inspect.isclass(kind) and not name.startswith("_")}
    return {kind for kind in classes if issubclass(kind, base) and kind is not base}


@pytest.mark.parametrize(
    ("module", "base", "rows"),
    [(torch.optim, torch.optim.Optimizer, OPTIMIZERS), (schedulers, schedulers.LRScheduler, SCHEDULERS)],
)
def test_nothing_torch_ships_is_missing(module: Any, base: type, rows: list[tuple[type, Any]]):
    assert _shipped(module, base) - {kind for kind, _ in rows} == set()


class Training:
    """A few parameters, an optimizer, perhaps a scheduler; gradients are a function of the step."""

    def __init__(self, kind: type[torch.optim.Optimizer], options: dict[str, Any], schedule: Any = None) -> None:
        options = {name: value.clone() if isinstance(value, Tensor) else value for name, value in options.items()}
        generator = torch.Generator().manual_seed(1)
        self.parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (5, 2))]
        self.optimizer = kind(self.parameters, **options)
        self.scheduler = schedule(self.optimizer) if schedule else None
        self.rates: list[Any] = []

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(100 + number)
        targets = [torch.randn(parameter.shape, generator=generator) for parameter in self.parameters]

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = sum((p - t).pow(4).sum() for p, t in zip(self.parameters, targets, strict=True))
            loss.backward()
            if isinstance(self.optimizer, torch.optim.SparseAdam):
                for parameter in self.parameters:
                    parameter.grad = parameter.grad.to_sparse(1)
            return loss.detach()

        self.optimizer.step(closure)
        if isinstance(self.scheduler, schedulers.ReduceLROnPlateau):
            self.scheduler.step(1.0 if number < 5 else 2.0)
        elif self.scheduler is not None:
            self.scheduler.step()
        self.rates.append([{**group, "params": None} for group in self.optimizer.param_groups])

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"parameters": [p.detach() for p in self.parameters]}
        state["optimizer"] = self.optimizer.state_dict()
        if self.scheduler is not None:
            state["scheduler"] = self.scheduler.state_dict()
        return state

    def load(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for parameter, saved in zip(self.parameters, state["parameters"], strict=True):
                parameter.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])


def _continues(make: Any) -> None:
    first, second = make(), make()
    for number in range(STEPS_BEFORE):
        first.step(number)
    saved = through_files(first.state())
    assert differences(first.state(), saved) == []
    second.load(saved)
    assert differences(first.state(), second.state()) == []
    first.rates.clear()
    for number in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
        first.step(number)
        second.step(number)
    assert differences(first.rates, second.rates) == []
    assert differences(first.state(), second.state()) == []


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_every_optimizer_continues_with_the_same_bits(kind: type[torch.optim.Optimizer], options: dict[str, Any]):
    _continues(lambda: Training(kind, options))


@pytest.mark.filterwarnings("ignore:.*epoch parameter.*:UserWarning")
@pytest.mark.parametrize(("kind", "schedule"), SCHEDULERS, ids=lambda value: getattr(value, "__name__", ""))
def test_every_scheduler_continues_with_the_same_bits(kind: type[schedulers.LRScheduler], schedule: Any):
    def make() -> Training:
        training = Training(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, schedule)
        assert type(training.scheduler) is kind
        return training

    _continues(make)


# --- tensors --------------------------------------------------------------------------------------------------------


def _tensors() -> dict[str, Tensor]:
    base = torch.arange(24.0).reshape(2, 3, 4)
    return {
        "plain": base.clone(),
        "scalar": torch.tensor(-0.0),
        "empty": torch.empty(0, 3),
        "empty inside": torch.empty(3, 0, 2).transpose(0, 2),
        "transposed": base.clone().transpose(0, 2),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "channels_last of one": torch.randn(1, 1, 4, 5).to(memory_format=torch.channels_last),
        "odd strides of one": torch.randn(3).as_strided((1, 3), (7, 1)),
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
        "expanded scalar": torch.tensor(3.0).expand(4, 4),
        "column": torch.arange(12.0).reshape(3, 4)[:, 1],
        "stepped": torch.arange(12)[::3],
        "windows": torch.arange(6.0).unfold(0, 3, 1),
        "bool": torch.tensor([True, False]),
        "bfloat16": torch.randn(5).bfloat16(),
        "half": torch.tensor([float("nan"), float("-inf"), -0.0]).half(),
        "float8": torch.randn(6).to(torch.float8_e4m3fn),
        "double": torch.randn(5, dtype=torch.float64),
        "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
        "int8": torch.arange(3, dtype=torch.int8),
        "complex64": torch.randn(2, 2, dtype=torch.complex64),
        "complex128": torch.randn(2, 2, dtype=torch.complex128).t(),
        "complex expanded": torch.randn(2, 1, dtype=torch.complex128).expand(2, 3),
        "scalar complex128": torch.tensor(1 + 2j, dtype=torch.complex128),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "nan bits": torch.tensor([0x7FC00001, -1, 0x7F800001], dtype=torch.int32).view(torch.float32),
        "permuted int": torch.arange(24).reshape(2, 3, 4).permute(1, 2, 0),
    }


@pytest.mark.parametrize("name", list(_tensors()))
def test_a_tensor_keeps_bits_dtype_shape_and_strides(name: str):
    tensor = _tensors()[name]
    back = through_files({"it": tensor})["it"]
    assert differences(tensor, back) == []
    assert type(back) is Tensor
    if name not in ("conjugate", "negative"):  # those are written as the values they stand for
        assert back.stride() == tensor.stride()


def test_all_tensors_at_once_are_the_same_as_each_alone():
    tensors = _tensors()
    assert differences(tensors, through_files(tensors)) == []


def test_names_are_readable_and_unique():
    tree = {
        "module": {"conv1.weight": torch.zeros(2)},
        "optimizers": [{"state": {3: {"exp_avg": torch.ones(2)}}}],
        "a": {"b": torch.zeros(1)},
        "a/b": torch.ones(1),
        "__metadata__": torch.ones(3),
        "bad \udce9": torch.ones(4),
        "keys": {1: torch.ones(5), "1": torch.ones(6)},
    }
    encoded = encode(tree)
    assert list(encoded.tensors)[:4] == ["module/conv1.weight", "optimizers/0/state/3/exp_avg", "a/b", "a/b~2"]
    assert len(encoded.tensors) == 8
    assert differences(tree, through_files(tree)) == []


def test_the_copy_is_the_staging():
    tree = {"weight": torch.zeros(3), "column": torch.zeros(2, 2)[:, 0], "array": np.zeros(3), "list": [1]}
    encoded = encode(tree)
    tree["weight"].fill_(1)
    tree["column"].fill_(1)
    tree["array"][:] = 1
    tree["list"].append(2)
    back = decode(encoded.document, encoded.tensors)
    assert back["weight"].sum() == 0
    assert back["column"].sum() == 0
    assert back["array"].sum() == 0
    assert back["list"] == [1]
    back["weight"].fill_(2)
    assert encoded.tensors["weight"].sum() == 0


def test_tied_tensors_are_written_once_and_stay_tied():
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    encoded = encode(module.state_dict())
    assert list(encoded.tensors) == ["0.weight"]
    back = through_files(module.state_dict())
    back["0.weight"].fill_(5)
    assert torch.equal(back["1.weight"], torch.full((3, 3), 5.0))


def test_views_of_one_buffer_keep_sharing_it():
    buffer = torch.arange(12.0)
    tree = {
        "front": buffer[:8],
        "back": buffer[4:].view(2, 4),
        "rows": buffer.view(3, 4)[:, 1],
        "bits": buffer.view(torch.int32)[2:5],
        "apart": torch.zeros(3),
    }
    encoded = encode(tree)
    assert sorted(encoded.tensors) == ["apart", "front"]
    back = through_files(tree)
    assert differences(tree, back) == []
    back["front"][5] = 100.0
    assert back["back"][0, 1] == 100.0
    assert back["rows"][1] == 100.0
    assert back["rows"].stride() == (4,)


def test_neighbours_in_one_buffer_are_plain_tensors():
    buffer = torch.arange(8.0)
    encoded = encode({"a": buffer[:4].view(2, 2), "b": buffer[4:]})
    assert {name: tensor.dtype for name, tensor in encoded.tensors.items()} == {"a": torch.float32, "b": torch.float32}


def test_a_view_of_a_large_buffer_does_not_bring_it_along():
    encoded = encode({"row": torch.zeros(1000, 1000)[3], "column": torch.zeros(3, 1000)[:, :2]})
    assert encoded.tensors["row"].numel() == 1000
    assert encoded.tensors["column"].nbytes < 3 * 1000 * 4


def test_parameters_and_gradients_flags_come_back():
    tree = {
        "parameter": nn.Parameter(torch.ones(2)),
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "leaf": torch.ones(2, requires_grad=True),
    }
    back = through_files(tree)
    assert [type(value) for value in back.values()] == [nn.Parameter, nn.Parameter, Tensor]
    assert [value.requires_grad for value in back.values()] == [True, False, True]


def test_sparse_gradients_come_back():
    sparse = torch.sparse_coo_tensor([[1, 1, 4]], [[1.0, 2], [3, 4], [5, 6]], (6, 2), check_invariants=True)
    back = through_files({"raw": sparse, "coalesced": sparse.coalesce()})
    assert not back["raw"].is_coalesced()
    assert back["coalesced"].is_coalesced()
    assert differences(back, {"raw": sparse, "coalesced": sparse.coalesce()}) == []


# --- everything that is not a tensor --------------------------------------------------------------------------------

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


def test_random_generators_continue():
    state = through_files(
        {"numpy": np.random.RandomState(3).get_state(), "torch": torch.Generator().manual_seed(1).get_state()}
    )
    again = np.random.RandomState(9)
    again.set_state(state["numpy"])
    assert again.rand() == np.random.RandomState(3).rand()
    pcg = np.random.default_rng(5)
    other = np.random.default_rng(6)
    other.bit_generator.state = through_files(pcg.bit_generator.state)
    assert other.random() == pcg.random()


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


# --- what is refused ------------------------------------------------------------------------------------------------


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


def test_a_scheduler_with_a_lambda_saves_what_torch_saves():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    state = schedulers.LambdaLR(optimizer, lambda epoch: 0.5).state_dict()
    assert through_files(state)["lr_lambdas"] == [None]
    with pytest.raises(UnsupportedState, match=r"lr_lambdas/0: function .*test_codec.*<lambda>"):
        encode({**state, "lr_lambdas": [lambda epoch: 0.5]})


# --- differences ----------------------------------------------------------------------------------------------------

DIFFERENT: dict[str, tuple[Any, Any, str]] = {
    "value": (1, 2, "x (1, now 2)"),
    "type": (1, 1.0, "x (1, now 1.0)"),
    "bool": (True, 1, "x (True, now 1)"),
    "sign": (0.0, -0.0, "x (0.0, now -0.0)"),
    "sequence": ([1], (1,), "x (list [1], now tuple (1,))"),
    "length": ([1], [1, 2], "x (1 items, now 2 items)"),
    "maxlen": (deque([1], 2), deque([1], 3), "x (maxlen 2, now maxlen 3)"),
    "missing": ({"a": 1}, {}, "x/a (1, now missing)"),
    "more": ({}, {"a": 1}, "x/a (missing, now 1)"),
    "dtype": (torch.ones(2), torch.ones(2).half(), "x (float32[2], now float16[2])"),
    "shape": (torch.ones(2), torch.ones(2, 1), "x (float32[2], now float32[2, 1])"),
    "zero": (torch.tensor(0.0), torch.tensor(-0.0), "x (float32[] 0.0, now float32[] -0.0)"),
    "bits": (torch.tensor([1, 2]), torch.tensor([1, 3]), "x (int64[2], now int64[2])"),
    "array": (np.ones(2), np.zeros(2), "x (float64[2], now float64[2])"),
}


@pytest.mark.parametrize("name", list(DIFFERENT))
def test_a_difference_is_named_with_both_values(name: str):
    left, right, words = DIFFERENT[name]
    assert differences({"x": left}, {"x": right}) == [words]


def test_nan_strides_and_order_of_keys_make_no_difference():
    nan = torch.tensor([math.nan, 1.0])
    assert differences({"a": nan, "b": math.nan}, {"b": math.nan, "a": nan.clone()}) == []
    assert differences(torch.arange(4).reshape(2, 2).t().contiguous(), torch.arange(4).reshape(2, 2).t()) == []
