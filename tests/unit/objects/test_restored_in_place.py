"""A restore fills live objects in place only where this changes nothing else."""

import copy
import logging
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from midstride.engine.objects.attributes import state_attributes
from midstride.engine.objects.object_state import Objects

pytestmark = pytest.mark.fast


class Net(nn.Module):
    def __init__(self, build: Callable[[Any], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.cfloat) * 1j)
        build(self)


def resumed(build: Callable[[Any], object], train: Callable[[Any], object]) -> tuple[Any, Any]:
    """Return a module after training, and one built anew that has its state."""
    trained, after = Net(build), Net(build)
    objects, restored = Objects.of_module(trained), Objects.of_module(after)
    train(trained)
    restored.load_state_dict(copy.deepcopy(objects.state_dict()))
    return trained, after


def build_rows(net: Any) -> None:
    net.rows = np.array([(1.0, 1), (2.0, 2)], dtype=[("x", "f8"), ("n", "i4")])
    net.row = net.rows[0]


def build_views(net: Any) -> None:
    net.rows = np.arange(6.0)
    net.row = net.rows[:2]


@pytest.mark.parametrize("build", [build_rows, build_views])
def test_a_part_that_moved_in_its_array_does_not_change_the_array(build: Callable[[Any], None]) -> None:
    def train(net: Any) -> None:
        net.row = net.rows[1] if build is build_rows else net.rows[2:4]

    trained, after = resumed(build, train)
    assert trained.rows.tobytes() == after.rows.tobytes()
    assert trained.row.tobytes() == after.row.tobytes()


def test_a_part_that_stayed_in_its_array_still_shares_its_memory() -> None:
    _, after = resumed(build_views, lambda net: net.rows.__iadd__(1))
    assert np.shares_memory(after.rows, after.row)
    assert after.row.tolist() == [1.0, 2.0]


def test_an_array_in_place_of_a_memory_map_leaves_the_file(tmp_path: Path) -> None:
    np.zeros(3).tofile(tmp_path / "rows")

    def build(net: Any) -> None:
        net.rows = np.memmap(tmp_path / "rows", dtype=np.float64, mode="r+")

    for made in (np.ones(3), np.memmap(tmp_path / "rows", dtype=np.float64, mode="r").copy() + 1):
        _, after = resumed(build, lambda net, made=made: setattr(net, "rows", made))  # type: ignore[misc]
        assert after.rows.tolist() == [1.0, 1.0, 1.0]
        assert np.fromfile(tmp_path / "rows").tolist() == [0.0, 0.0, 0.0]


def test_an_array_in_place_of_a_constant_leaves_the_constant() -> None:
    constant, other = np.zeros(2), np.ones(2)
    constant.setflags(write=False)

    _, after = resumed(lambda net: setattr(net, "held", constant), lambda net: setattr(net, "held", other))
    assert after.held.tolist() == [1.0, 1.0]
    assert constant.tolist() == [0.0, 0.0]


def test_a_dead_weak_proxy_beside_an_array_is_no_obstacle() -> None:
    def build(net: Any) -> None:
        net.array, net.dead = np.zeros(2), [weakref.proxy(nn.Linear(1, 1))]

    _, after = resumed(build, lambda net: net.array.__iadd__(1))
    assert after.array.tolist() == [1.0, 1.0]


def test_an_attribute_of_a_tensor_that_new_code_sets_stays() -> None:
    def build(net: Any) -> None:
        net.held = torch.zeros(2)

    def build_tagged(net: Any) -> None:
        build(net)
        net.held.tag = "new"

    trained, after = Net(build), Net(build_tagged)
    state = copy.deepcopy(Objects.of_module(trained).state_dict())
    Objects.of_module(after).load_state_dict(state)
    assert after.held.tag == "new"


@pytest.mark.parametrize("kind", [np.complex64, ">i4"])
def test_an_array_in_a_weight_that_is_no_tensor_there_has_its_values(kind: Any) -> None:
    """In a weight that begins in the middle of a complex number, or in another order of bytes."""

    def build(net: Any) -> None:
        net.bias, net.held = nn.Parameter(torch.arange(9.0)[1:5]), None

    trained, after = resumed(build, lambda net: setattr(net, "held", net.bias.detach().numpy().view(kind)))
    assert trained.held.tolist() == after.held.tolist()


def test_a_socket_in_place_of_an_array_leaves_the_array() -> None:
    with socket.socket() as opened:
        _, after = resumed(lambda net: setattr(net, "held", [np.ones(2)]), lambda net: net.held.__setitem__(0, opened))
    assert after.held[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("train", [torch._neg_view, torch.clone], ids=["negative", "plain"])
def test_a_conjugate_view_becomes_another_view(train: Callable[[Any], Any]) -> None:
    def build(net: Any) -> None:
        net.held, net.view = torch.ones(2, dtype=torch.cfloat).conj(), net.weight.detach().conj()

    def change(net: Any) -> None:
        net.held, net.view = train(torch.ones(2, dtype=torch.cfloat) * 2j), net.weight.detach()

    trained, after = resumed(build, change)
    assert torch.equal(trained.held, after.held)
    assert torch.equal(trained.view, after.view)


def test_a_gradient_that_came_later_is_removed() -> None:
    def build(net: Any) -> None:
        net.held = torch.zeros(2, requires_grad=True)

    net = Net(build)
    objects = Objects.of_module(net)
    before = copy.deepcopy(objects.state_dict())
    net.held.sum().backward()
    objects.load_state_dict(before)
    assert net.held.grad is None


def test_a_lock_in_place_of_none_is_made() -> None:
    _, after = resumed(lambda net: setattr(net, "lock", None), lambda net: setattr(net, "lock", threading.Lock()))
    assert after.lock.acquire(blocking=False)


def test_a_logger_of_ones_own_keeps_its_handlers() -> None:
    def build(net: Any) -> None:
        net.log = logging.Logger("own")
        net.log.addHandler(logging.NullHandler())

    _, after = resumed(build, lambda _: None)
    assert after.log.handlers


@pytest.mark.parametrize("length", [1, 1000])
def test_an_id_is_found_at_each_place_of_a_list(length: int) -> None:
    _, after = resumed(
        lambda net: setattr(net, "ids", []), lambda net: setattr(net, "ids", [(0, id(net.weight))] * length + [(1, 2)])
    )
    assert after.ids[0][1] == id(after.weight)


class _Rate(float):
    """A number of a user's class."""


#: makes a value -> whether a restore fills it, so that another holder has the restored value, too
FILLED: list[tuple[Callable[[], Any], bool]] = [
    *((make, True) for make in (list, dict, deque, lambda: torch.zeros(2), lambda: np.zeros(2))),
    *((make, False) for make in (lambda: iter(range(3)), lambda: iter(deque([1])), lambda: zip([1], [2], strict=True))),
    *((make, False) for make in (lambda: _Rate(1), lambda: ValueError(1), lambda: torch.eye(2).to_sparse())),
]


@pytest.mark.parametrize(("make", "is_filled"), FILLED)
def test_places_are_those_of_objects_that_a_restore_fills(make: Callable[[], Any], is_filled: bool) -> None:
    module: Any = nn.Module()
    module.held = make()

    assert (id(module.held) in Objects.of_module(module).places()) == is_filled


def test_a_schedulers_mark_on_its_optimizer_is_no_state() -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    assert "state" in state_attributes(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert "step" in vars(optimizer)
    assert "step" not in state_attributes(optimizer)
