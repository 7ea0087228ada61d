"""Which hook is which does not depend on those that torch registers beside it, or on the process."""

import copy

import pytest
from torch import nn
from torch.nn.utils import spectral_norm

from midstride.engine.objects.object_state import Objects
from midstride.engine.objects.roots import module_hooks, user_hooks
from midstride.engine.state.differences import differences

NAMES = ("_forward_pre_hooks", "_forward_hooks")


def own(*_: object) -> None:
    pass


def test_hooks_of_torch_do_not_count() -> None:
    alone, beside = nn.Linear(2, 2), spectral_norm(nn.Linear(2, 2))
    for layer in (alone, beside):
        layer.register_forward_hook(own)
        layer.register_forward_pre_hook(own)
    assert len(beside._forward_pre_hooks) == 2
    assert user_hooks(alone, NAMES) == user_hooks(beside, NAMES)
    assert [*user_hooks(alone, NAMES).values()] == [own, own]


def test_hooks_have_one_order_in_all_processes() -> None:
    """The names of their kinds are in a set, whose order depends on the process."""
    layer = nn.Linear(2, 2)
    registers = sorted(name for name in dir(layer) if name.startswith("register_") and name.endswith("_hook"))
    for name in registers:
        if "full" not in name:
            getattr(layer, name)(own)
    kinds = [name.rpartition("_")[0] for name in module_hooks(layer)]
    assert len(kinds) > 4
    assert kinds == sorted(kinds)


def test_a_hook_that_training_removes_is_no_obstacle_to_a_resume() -> None:
    trained, resumed = nn.Linear(2, 2), nn.Linear(2, 2)
    handle, _ = trained.register_forward_hook(own), resumed.register_forward_hook(own)
    objects = Objects.of_module(trained), Objects.of_module(resumed)
    handle.remove()

    state = objects[0].state_dict()
    objects[1].load_state_dict(state)

    assert not differences(state, objects[1].state_dict())  # as a fit compares them


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, *_: object) -> None:
        pass


def test_the_state_of_a_hook_goes_to_no_other_one(caplog: pytest.LogCaptureFixture) -> None:
    """Training removes the first of two."""
    trained, resumed = nn.Linear(2, 2), nn.Linear(2, 2)
    handles = [layer.register_forward_hook(Scale(n)) for layer in (trained, resumed) for n in (2.0, 3.0)]
    objects = Objects.of_module(trained), Objects.of_module(resumed)
    handles[0].remove()
    objects[1].load_state_dict(copy.deepcopy(objects[0].state_dict()))
    assert [hook.factor for hook in resumed._forward_hooks.values()] == [2.0, 3.0]
    assert "fewer hooks" in caplog.text
