"""Learning rates are scaled wherever torch keeps them: as if they had been written so."""

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler

from midstride.engine.optim.schedulers import scale_learning_rates

LR = 0.25

#: scheduler -> its arguments, made of an optimizer and what rates are multiplied by; by powers of two no bit is lost
SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o, f: {"lr_lambda": lambda epoch: 0.5**epoch},
    "MultiplicativeLR": lambda o, f: {"lr_lambda": lambda epoch: 0.5},
    "StepLR": lambda o, f: {"step_size": 2, "gamma": 0.5},
    "MultiStepLR": lambda o, f: {"milestones": [2, 4], "gamma": 0.5},
    "ConstantLR": lambda o, f: {},
    "LinearLR": lambda o, f: {},
    "ExponentialLR": lambda o, f: {"gamma": 0.5},
    "PolynomialLR": lambda o, f: {},
    "CosineAnnealingLR": lambda o, f: {"T_max": 4, "eta_min": 0.0625 * f},
    "CosineAnnealingWarmRestarts": lambda o, f: {"T_0": 3, "eta_min": 0.0625 * f},
    "CyclicLR": lambda o, f: {"base_lr": 0.0625 * f, "max_lr": f, "step_size_up": 2},
    "OneCycleLR": lambda o, f: {"max_lr": f, "total_steps": 9},
    "ReduceLROnPlateau": lambda o, f: {"patience": 0, "factor": 0.5, "min_lr": 0.0625 * f},
    "SequentialLR": lambda o, f: {
        "schedulers": [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.5)],
        "milestones": [3],
    },
    "ChainedScheduler": lambda o, f: {
        "schedulers": [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.5)]
    },
}


def rates(name: str, factor: int, *, scaled: bool) -> list[float]:
    """The rates of eight steps, written `factor` times as large or scaled by it afterwards."""
    written = 1 if scaled else factor
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=LR * written, momentum=0.9)
    arguments = SCHEDULERS[name](optimizer, written)
    given = () if name == "ChainedScheduler" else (optimizer,)
    scheduler = getattr(lr_scheduler, name)(*given, **arguments)
    if scaled:
        scale_learning_rates([optimizer], [scheduler], factor)
    found = []
    for _ in range(8):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    return found


def test_every_scheduler_of_torch_is_in_the_table() -> None:
    kinds = [kind for kind in vars(lr_scheduler).values() if inspect.isclass(kind)]
    names = {kind.__name__ for kind in kinds if kind.__module__ == lr_scheduler.__name__}
    assert {name for name in names if not name.startswith("_")} - {"LRScheduler"} == set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scaled_rates_are_those_written_so_much_larger(name: str) -> None:
    expected = rates(name, 4, scaled=False)
    assert rates(name, 4, scaled=True) == expected
    assert len(set(expected)) > 1


def test_a_tensor_for_a_rate() -> None:
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=torch.tensor(0.25))
    scale_learning_rates([optimizer], [], 2)
    assert optimizer.param_groups[0]["lr"] == 0.5
