"""What a module has come to consist of, beside what another attempt can build."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from midstride.engine.errors import UserError
from midstride.engine.modules import structure
from midstride.engine.modules.structure import ModuleStructure, structure_of


def test_a_layer_that_cannot_be_rebuilt_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    device = torch.device("cpu")
    trained, again = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    before, resumed = ModuleStructure(trained, device), ModuleStructure(again, device)
    trained.append(nn.TransformerEncoderLayer(2, 1, 2, activation=F.gelu))  # compiled, and no function of Python's

    state = before.state_dict()

    assert (
        "1 was created in training and holds objects that no snapshot can hold (structure/1/activation)" in caplog.text
    )
    with pytest.raises(
        UserError, match=r"the module 1 was created .*: 1 \(was .*EncoderLayer with .*gelu.* in __init__, setup"
    ):
        resumed.load_state_dict(state)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("cache", torch.zeros(4), persistent=False)
        self.flat = nn.Parameter(torch.zeros(2, 2, requires_grad=True))


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda net: None,
    "values": lambda net: net.mean.add_(1),
    "a new layer": lambda net: net.layers.append(nn.Linear(2, 2)),
    "a layer gone": lambda net: delattr(net.layers, "1"),
    "a layer shared": lambda net: setattr(net.layers, "1", net.layers[0]),
    "a new buffer": lambda net: net.register_buffer("late", torch.ones(1)),
    "a buffer gone": lambda net: setattr(net, "mean", None),
    "a buffer of another shape": lambda net: net.mean.resize_(2),
    "a buffer of another dtype": lambda net: setattr(net, "mean", net.mean.double()),
    "another persistence": lambda net: net._non_persistent_buffers_set.discard("cache"),
    "other strides": lambda net: setattr(net.flat, "data", net.flat.data.t()),
    "shared memory": lambda net: setattr(net.layers[1].weight, "data", net.layers[0].weight.data),
    "a view": lambda net: setattr(net.layers[1].bias, "data", net.flat.data[0]),
    "a sparse buffer": lambda net: setattr(net, "mean", torch.eye(4).to_sparse()),
    "a parameter gone": lambda net: setattr(net, "flat", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_snapshots_is_seen(change: str) -> None:
    net = Net()
    known, new = (ModuleStructure(net, torch.device("cpu")) for _ in range(2))
    new._as_built = None  # it compares name by name
    assert known.state_dict() == known.state_dict() == {}
    CHANGES[change](net)
    for _ in range(2):
        found, right = structure_of(known), structure_of(new)
        assert str(found) == str(right)
        assert isinstance(found, UserError) or bool(found) is (change not in ("nothing", "values"))


def test_a_module_as_it_was_built_is_not_compared_name_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    built = ModuleStructure(Net(), torch.device("cpu"))
    monkeypatch.setattr(structure, "named_tensors", pytest.fail)
    assert built.state_dict() == {}
