"""The codec on every optimizer and every scheduler of torch."""

import importlib
import inspect
from typing import Any

import pytest
import torch
from support.codec_round_trip import through_files
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from midstride.engine.state.differences import differences

STEPS_BEFORE, STEPS_AFTER = 7, 20


@pytest.fixture(scope="module", autouse=True)
def _torch_is_warm() -> None:
    """Let torch import its compiler, as the first step of some optimizers does: it sets an environment variable."""
    importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    Training(torch.optim.ASGD, {}).step(0)


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
