"""What callbacks, data and `on_save_checkpoint` keep on a GPU comes back to it; what is on the host stays there."""

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu.test_two_devices import GPUS
from torch._subclasses.fake_tensor import FakeTensorMode

from midstride.engine import Callback, DataModule
from midstride.engine.modules.callback_states import Callbacks
from midstride.engine.objects.kinds.tensors import tensors_in
from midstride.engine.state.object_nodes import Instance, instances_in
from midstride.engine.state.stateful import Stateful
from midstride.engine.training.fit_state import UserState

#: "meta" stands for a GPU where tensors have numbers
HOST, THERE = torch.device("cpu"), torch.device("meta")


class Keeps:
    """Keeps a tree of tensors."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def state_dict(self) -> dict[str, Any]:
        return {"tree": self.tree}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.tree = state_dict["tree"]

    # As the hooks of a module that keeps it.

    def drop_of_libraries(self, names: tuple[str, ...], refuses: object) -> None: ...

    def named(self, name: str) -> list[tuple[str, Callable[[dict[str, Any]], None]]]:
        return [("Keeps.on_save_checkpoint", lambda checkpoint: checkpoint.update(tree=self.tree))]

    def call(self, name: str, checkpoint: dict[str, Any], of: str = "all") -> None:
        if of == "module":
            self.tree = checkpoint["tree"]


class Keeper(Keeps, Callback):
    pass


class Data(Keeps, DataModule):
    pass


Part = Callable[[Any, torch.device], tuple[Any, Stateful]]


def _hooks(tree: Any, device: torch.device) -> tuple[Any, Stateful]:
    hooks: Any = Keeps(tree)
    return hooks, UserState(hooks, device)


def _owner(kind: type[Any]) -> Part:
    def made(tree: Any, device: torch.device) -> tuple[Any, Stateful]:
        owner = kind(tree)
        return owner, Callbacks([owner], device)

    return made


#: what keeps a tree -> that, and the part of a run's state that it is in
PARTS: dict[str, Part] = {"a callback": _owner(Keeper), "a DataModule": _owner(Data), "on_save_checkpoint": _hooks}
#: trees of a value that is on a GPU and one that is not, given both
TREES: dict[str, Callable[[Any, Any], Any]] = {
    "a dict": lambda there, here: {"there": there, "here": here},
    "a nest": lambda there, here: [(1, {"there": there}), "text", here],
    "other containers": lambda there, here: {"last": deque([there], maxlen=2), "of": defaultdict(list, here=here)},
    "one twice": lambda there, here: {"there": [there, there], "here": here},
}


def devices_in(tree: Any) -> list[torch.device]:
    """Return where the tensors in `tree` are, each of them once."""
    return [tensor.device for tensor in {id(tensor): tensor for tensor in tensors_in(tree)}.values()]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("part", PARTS)
def test_a_state_says_which_of_its_tensors_are_a_gpus(part: str, tree: str, fake: FakeTensorMode) -> None:
    keeper, kept = PARTS[part](TREES[tree](torch.zeros(2).to(GPUS[1]), 3), GPUS[1])
    state = kept.state_dict()
    assert devices_in(state) == [GPUS[1]]
    assert {node.state["value"].device for _, node in instances_in(state, "tensor")} == {GPUS[1]}
    before, keeper.tree = keeper.tree, None
    kept.load_state_dict(state)  # as is tried when a fit begins
    assert devices_in(keeper.tree) == devices_in(before) == [GPUS[1]]
    assert not [*instances_in(keeper.tree, "tensor")]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("part", PARTS)
def test_each_tensor_comes_back_to_where_it_was(part: str, tree: str) -> None:
    node = Instance("tensor", "", {"value": torch.ones(2), "on_device": True})  # as a file has it
    keeper, kept = PARTS[part](TREES[tree](node, torch.zeros(3)), THERE)
    state, keeper.tree = kept.state_dict(), None
    kept.load_state_dict(state)
    assert devices_in(keeper.tree) == [THERE, HOST]


@pytest.mark.parametrize("part", PARTS)
def test_a_state_of_the_host_alone_is_given_as_it_is(part: str) -> None:
    shared = [torch.zeros(2)]
    keeper, kept = PARTS[part]({"one": shared, "other": shared}, THERE)
    state = kept.state_dict()
    kept.load_state_dict(state)
    assert keeper.tree["one"] is keeper.tree["other"]
