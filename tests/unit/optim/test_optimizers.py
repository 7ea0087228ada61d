"""What a load does to the groups and the state of optimizers of any form."""

from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from midstride.engine.optim.optimizers import OptimizerList


class Shares(SGD):
    """Hands its groups to an optimizer of its own, as SAM does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.base = SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.base.param_groups = self.param_groups


class Wraps(Optimizer):
    """Has the groups of another one, and was built without torch's `__init__`."""

    def __init__(self, parameters: Any) -> None:
        self.base = SGD(parameters, lr=0.1, momentum=0.9)
        self.param_groups, self.state = self.base.param_groups, defaultdict(dict)

    def state_dict(self) -> Any:
        return {"base": self.base.state_dict()}

    def load_state_dict(self, state_dict: Any) -> None:
        self.base.load_state_dict(state_dict["base"])
        self.param_groups = self.base.param_groups


class Chains(Optimizer):
    """Has the groups of several others as a property, and was built by torch's `__init__`."""

    def __init__(self, parameters: Any) -> None:
        self.base = [SGD([one], lr=0.1, momentum=0.9) for one in parameters]
        super().__init__([nn.Parameter(torch.zeros(1))], {})

    @property
    def param_groups(self) -> Any:
        return [group for one in self.base for group in one.param_groups]

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        pass

    def add_param_group(self, param_group: Any) -> None:
        pass

    def state_dict(self) -> Any:
        return {"base": [one.state_dict() for one in self.base]}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(super().state_dict())
        for one, state in zip(self.base, state_dict["base"], strict=True):
            one.load_state_dict(state)


def with_momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("build", [with_momentum, Shares, Wraps, Chains])
def test_a_load_restores_the_groups_of_any_optimizer(build: Callable[[Any], Any]) -> None:
    layer = nn.Linear(2, 1)
    optimizer = build(layer.parameters())
    states = OptimizerList(lambda: [optimizer], layer)
    saved = deepcopy(states.state_dict())
    optimizer.param_groups[0]["lr"] = 0.5
    states.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["params"][0] is layer.weight


@pytest.mark.parametrize("build", [with_momentum, Shares])
def test_a_load_fills_the_groups_and_the_state_that_a_program_holds(build: Callable[[Any], Any]) -> None:
    layer = nn.Linear(2, 1)
    optimizer = build(layer.parameters())
    groups, group, state = optimizer.param_groups, optimizer.param_groups[0], optimizer.state
    states = OptimizerList(lambda: [optimizer], layer)
    states.load_state_dict(states.state_dict())
    assert optimizer.param_groups is groups
    assert optimizer.param_groups[0] is group
    assert optimizer.state is state
    assert getattr(optimizer, "base", optimizer).param_groups is groups
