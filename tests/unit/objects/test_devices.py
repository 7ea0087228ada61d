"""Tensors of an accelerator come back to it, and those of the host stay there; "meta" stands for one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from midstride.engine.errors import NotExact
from midstride.engine.modules.structure import ModuleStructure
from midstride.engine.objects.kinds.kind import MISSING
from midstride.engine.objects.restore import GraphRestore
from midstride.engine.objects.walk import GraphWalk
from midstride.engine.optim.optimizers import OptimizerList
from midstride.engine.state.object_nodes import Instance
from midstride.engine.state.torch_internals import is_view_of_one

THERE = torch.device("meta")


def on_device(value: Tensor) -> Instance:
    return Instance("tensor", "", {"value": value, "on_device": True})


#: what the snapshot has, what is live, and whether that takes the values
ROWS: dict[str, tuple[Any, Any, bool]] = {
    "a tensor": (on_device(torch.ones(2)), MISSING, False),
    "a tensor that is there": (on_device(torch.ones(2)), torch.zeros(2, device=THERE), True),
    "a tensor that is on the host": (on_device(torch.ones(2)), torch.zeros(2), False),
    "a leaf": (on_device(torch.ones(2, requires_grad=True)), MISSING, False),
    "a parameter": (on_device(nn.Parameter(torch.ones(2))), MISSING, False),
    "a frozen parameter": (on_device(nn.Parameter(torch.ones(2), requires_grad=False)), MISSING, False),
    "of the host": (torch.ones(2), MISSING, False),
    "of the host, and there": (torch.ones(2), torch.zeros(2), True),
    "of the host, and on the device": (torch.ones(2), torch.zeros(2, device=THERE), False),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_tensor_comes_back_to_where_it_was(name: str) -> None:
    node, live, is_taken = ROWS[name]
    saved = node.state["value"] if isinstance(node, Instance) else node
    found = GraphRestore(GraphWalk({}, {}), {}, THERE).value(node, live, "x")
    assert (found is live) == is_taken
    assert found.device == (THERE if isinstance(node, Instance) else torch.device("cpu"))
    assert (type(found), found.is_leaf, found.requires_grad) == (type(saved), True, saved.requires_grad)


def test_tensors_that_share_memory_share_it_on_the_device() -> None:
    base = torch.arange(6.0)
    restore = GraphRestore(GraphWalk({}, {}), {}, THERE)
    whole, part, apart = (restore.value(on_device(x), MISSING, str(x)) for x in (base, base[2:5:2], base.clone()))
    assert (part.shape, part.stride(), part.storage_offset()) == ((2,), (2,), 2)
    assert is_view_of_one(whole, [part])
    assert not is_view_of_one(whole, [apart])


#: what is live where a snapshot has a generator of a GPU, whose state is 16 bytes
GENERATORS = {"one of the host": torch.Generator(), "none": MISSING}


def saved_on_a_gpu() -> Instance:
    return Instance("generator", "torch._C:Generator", {"state": torch.zeros(16, dtype=torch.uint8)})


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_of_a_gpu_is_refused_on_the_host(name: str) -> None:
    words = "^x draws from a generator of a GPU in the snapshot, and this rank trains on the CPU"
    with pytest.raises(NotExact, match=words):
        GraphRestore(GraphWalk({}, {}), {}, torch.device("cpu")).value(saved_on_a_gpu(), GENERATORS[name], "x")


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_of_a_gpu_is_made_there(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"(?i)device type.*meta|meta device"):  # "meta" has no generators
        GraphRestore(GraphWalk({}, {}), {}, THERE).value(saved_on_a_gpu(), GENERATORS[name], "x")


def test_a_learning_rate_comes_back_to_where_it_was_built() -> None:
    layer = nn.Linear(2, 2, device=THERE)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device=THERE)
    states = OptimizerList(lambda: [optimizer], layer)
    saved = states.state_dict()
    saved["0"]["param_groups"][0]["lr"] = torch.tensor(0.05)

    states.load_state_dict(saved)

    assert optimizer.param_groups[0]["lr"].device == THERE


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, device=THERE)


def test_new_buffers_and_layers_return_to_their_device() -> None:
    net, again = Net(), Net()
    structure, restored = ModuleStructure(net, THERE), ModuleStructure(again, THERE)
    net.register_buffer("there", torch.zeros(2, device=THERE))
    net.register_buffer("here", torch.zeros(2))
    net.scale = nn.BatchNorm1d(2)
    state = structure.state_dict()

    restored.load_state_dict(state)

    assert {name: buffer.device.type for name, buffer in again.named_buffers()} == {
        "there": "meta",
        **dict.fromkeys(("here", "scale.running_mean", "scale.running_var", "scale.num_batches_tracked"), "cpu"),
    }
    assert {parameter.device.type for parameter in again.scale.parameters()} == {"cpu"}
    assert not restored.state_dict().keys() ^ state.keys()
