"""An index names the members of a module as torch does, whatever was changed since it was last asked."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from midstride.engine.state.module_index import ModuleIndex

pytestmark = pytest.mark.fast


class Renaming(nn.Module):
    """Names its parameters in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.prefix = nn.Parameter(torch.ones(1)), "a"

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        return super().named_modules(memo, prefix + self.prefix, remove_duplicate)


def _net() -> Any:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 2, bias=False)))
    net.register_buffer("cache", torch.zeros(1), persistent=False)
    net[2].again = net[0]
    return net


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda net: None,
    "a layer": lambda net: net.append(nn.Linear(1, 1)),
    "another layer": lambda net: setattr(net[2], "0", nn.Linear(2, 2, bias=False)),
    "no layer": lambda net: setattr(net[2], "0", None),
    "a layer removed": lambda net: delattr(net[2], "0"),
    "a layer renamed": lambda net: setattr(net[2], "new", net[2]._modules.pop("0")),
    "the order of layers": lambda net: net._modules.update({"0": net._modules.pop("0")}),
    "a layer not shared": lambda net: setattr(net[2], "again", nn.Linear(2, 2)),
    "a parameter": lambda net: setattr(net[0], "weight", nn.Parameter(torch.ones(2, 2))),
    "a parameter moved": lambda net: net[2][0]._parameters.update(bias=net[0]._parameters.pop("bias")),
    "a parameter tied": lambda net: setattr(net[2][0], "weight", net[0].weight),
    "a parameter more": lambda net: net[2][0].register_parameter("bias", nn.Parameter(torch.ones(2))),
    "no parameter": lambda net: setattr(net[0], "bias", None),
    "a buffer": lambda net: setattr(net, "cache", torch.ones(3)),
    "a buffer more": lambda net: net[0].register_buffer("mean", torch.zeros(1)),
    "a buffer gone": lambda net: delattr(net, "cache"),
    "another way of naming": lambda net: net.append(Renaming()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_members_are_those_of_torch(change: str) -> None:
    net = _net()
    index = ModuleIndex(net)
    assert index.now().version == index.now().version
    CHANGES[change](net)
    for _ in range(2):
        now = index.now()
        for found, right in (
            (now.modules, net.named_modules()),
            (now.parameters, net.named_parameters()),
            (now.buffers, net.named_buffers()),
        ):
            expected = dict(right)
            assert [*found] == [*expected]
            assert all(found[name] is expected[name] for name in expected)
        assert {*map(id, now.tensors)} == {*map(id, [*net.parameters(), *net.buffers()])}


def test_a_kept_lookup_lasts_until_it_is_forgotten() -> None:
    net = _net()
    index = ModuleIndex(net)
    with index.kept():
        before = index.now()
        net.append(nn.Linear(1, 1))
        assert index.now() is before
        index.forget()
        after = index.now()
        assert [*after.modules] == [*dict(net.named_modules())]
        assert index.now() is after
    assert index.now() is not after


def test_persistence_changes_the_version() -> None:
    net = _net()
    index = ModuleIndex(net)
    before = index.now().version
    net._non_persistent_buffers_set.discard("cache")
    assert index.now().version > before


def test_a_module_with_its_own_names_is_looked_up_each_time() -> None:
    net = nn.Sequential(Renaming())
    index = ModuleIndex(net)
    index.now()
    net[0].prefix = "b"
    assert [*index.now().parameters] == ["0b.weight"]


def test_an_index_keeps_no_member_alive() -> None:
    net = _net()
    index = ModuleIndex(net)
    index.now()
    gone = weakref.ref(net[0].weight), weakref.ref(net[1])
    net[0].weight, net[1] = nn.Parameter(torch.ones(2, 2)), nn.Identity()
    gc.collect()
    assert [one() for one in gone] == [None, None]
    assert index.now().parameters["0.weight"] is net[0].weight


@dataclass(eq=True, unsafe_hash=True)
class Equal(nn.Module):
    width: int = 2

    def __post_init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "width":  # set before the module is one
            vars(self)[name] = value
        else:
            super().__setattr__(name, value)


def test_equal_modules_have_indices_of_their_own() -> None:
    one, other = Equal(), Equal()
    assert one == other
    assert ModuleIndex.of(one).now().parameters["layer.weight"] is one.layer.weight
    assert ModuleIndex.of(other).now().parameters["layer.weight"] is other.layer.weight
    assert ModuleIndex.of(one) is ModuleIndex.of(one)


def test_tensors_of_an_index_can_be_swapped() -> None:
    net = _net()
    index = ModuleIndex.of(net)
    before = index.now().parameters["0.weight"]
    torch.utils.swap_tensors(before, nn.Parameter(torch.full((2, 2), 3.0)))  # as Module.to does with DTensors
    assert index.now().parameters["0.weight"] is before
    assert torch.equal(before, torch.full((2, 2), 3.0))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # its category differs between versions of torch
def test_members_of_a_torchscript_module_are_found() -> None:
    net = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    for _ in range(2):
        assert [*ModuleIndex.of(net).now().parameters] == ["0.weight", "0.bias"]
