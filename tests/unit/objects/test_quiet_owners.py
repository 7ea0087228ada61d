"""Layers and tensors that were as built at one snapshot are seen at the next if anything about them has changed."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from midstride.engine.objects.object_state import Objects
from midstride.engine.objects.roots import QuietOwners, Root, module_anchors, module_roots
from midstride.engine.state.differences import differences
from midstride.engine.state.module_index import Members

pytestmark = pytest.mark.fast


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.norm, self.drop = nn.BatchNorm1d(2), nn.Dropout(0.5)
        self.wide = nn.Linear(70_000, 1)


def _hook(*_: Any) -> None:
    pass


class Other(nn.Linear):
    pass


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda net: None,
    "a number": lambda net: setattr(net.drop, "p", 0.25),
    "the sign of zero": lambda net: setattr(net.norm, "momentum", -0.0),
    "a number of another type": lambda net: setattr(net.layers[1], "in_features", 2.0),
    "an attribute": lambda net: setattr(net.layers[1], "seen", 3),
    "an attribute gone": lambda net: delattr(net.layers[1], "out_features"),
    "an attribute renamed": lambda net: setattr(net.layers[1], "new", vars(net.layers[1]).pop("in_features")),
    "a list": lambda net: setattr(net.norm, "history", [1, 2]),
    "a shared list": lambda net: [setattr(net, "list", [1]), setattr(net.norm, "list", net.list)],
    "the address of another": lambda net: setattr(net.layers[1], "of", id(net.norm)),
    "a large number": lambda net: setattr(net.wide, "in_features", 80_000),
    "a class": lambda net: setattr(net.layers[1], "__class__", Other),
    "a layer": lambda net: setattr(net, "drop", nn.Dropout(0.75)),
    "a hook": lambda net: net.layers[1].register_forward_hook(_hook),
    "an attribute of a weight": lambda net: setattr(net.layers[1].weight, "rank", 3),
    "a hook of a weight": lambda net: net.layers[1].weight.register_hook(_hook),
    "a hook on gradients": lambda net: net.layers[1].weight.register_post_accumulate_grad_hook(_hook),
    "an attribute of a buffer": lambda net: setattr(net.norm.running_mean, "rank", 3),
    "another weight": lambda net: setattr(net.layers[1], "weight", nn.Parameter(torch.ones(2, 2))),
}


def _objects(net: nn.Module, *, is_forgetful: bool) -> Objects:
    def roots(members: Members, quiet: QuietOwners | None) -> Iterator[Root]:
        return module_roots(members, None if is_forgetful else quiet)

    return Objects(net, roots, module_anchors, torch.device("cpu"))


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_snapshots_is_seen(change: str, caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    found, right = _objects(net, is_forgetful=False), _objects(net, is_forgetful=True)
    before = found.state_dict()
    assert differences(right.state_dict(), before) == []
    CHANGES[change](net)
    said: list[str] = []
    for _ in range(3):
        caplog.clear()
        now = found.state_dict()
        warned = [record.getMessage() for record in caplog.records]
        caplog.clear()
        assert differences(right.state_dict(), now) == []
        assert [record.getMessage() for record in caplog.records] == warned
        said += warned
    assert change in SILENT or differences(before, now) or said


#: changes that are no part of this state
SILENT = ("nothing", "another weight")


def test_layers_as_they_were_are_left_out() -> None:
    net, counts = Net(), list[int]()

    def roots(members: Members, quiet: QuietOwners | None) -> Iterator[Root]:
        found = [*module_roots(members, quiet)]
        counts.append(len(found))
        return iter(found)

    objects = Objects(net, roots, module_anchors, torch.device("cpu"))
    objects.load_state_dict(objects.state_dict())
    assert counts[0] > 20
    assert max(counts[1:]) < 6
