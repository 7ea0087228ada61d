"""Hooks that training adds or removes."""

from typing import Any

import torch
from laws.objects.small import Small
from torch import Tensor, nn


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


class HookedLate(Small):
    """A hook that training adds."""

    warns = r"hooks:doubled in layer\.forward_hooks is new\. A res"

    def factor(self, batch: Tensor) -> Any:
        if self.global_step == 1 and not self.layer._forward_hooks:
            self.layer.register_forward_hook(doubled)
        return 1.0


class Unhooked(Small):
    """A hook that training removes, before another that stays."""

    warns = r"<lambda> in act\.backward_hooks is gone\. A"

    def build(self) -> None:
        self.act = nn.ReLU()
        self.handle = self.act.register_full_backward_hook(lambda module, *gradients: None)
        self.act.register_full_backward_hook(self.seen)

    def seen(self, module: nn.Module, *gradients: Any) -> None: ...

    def factor(self, batch: Tensor) -> Any:
        if self.global_step == 1:
            self.handle.remove()
        return 1 + self.act(self.layer(batch)).mean()


class HookedForAStep(Small):
    """A hook that each step adds and removes, of which nothing is to be said."""

    def factor(self, batch: Tensor) -> Any:
        handle = self.layer.register_forward_hook(doubled)
        self.layer(batch)
        handle.remove()
        return 1.0


class TensorHooked(Small):
    """A hook of a parameter, which alone knows how often it was called."""

    def build(self) -> None:
        calls = [0]

        def scaled(gradient: Tensor) -> Tensor:
            calls[0] += 1
            return gradient * calls[0]

        self.layer.weight.register_hook(scaled)


class TensorHookedLate(Small):
    warns = r"hooks:TensorHookedLate\S+<lambda> in tensor layer\.weight\.backward_hooks is new\. A res"

    def factor(self, batch: Tensor) -> Any:
        if self.global_step == 1 and not self.layer.weight._backward_hooks:
            self.layer.weight.register_hook(lambda gradient: gradient * 2)
        return 1.0


class HooksTeacher(Small):
    """Training registers a hook on a layer that is in no part of the module."""

    warns = r"which no snapshot holds: .*<lambda> in module\.teachers\.0\.forward_hooks is new"

    def build(self) -> None:
        self.teachers = [nn.Linear(2, 1)]

    def factor(self, batch: Tensor) -> Any:
        if self.global_step == 1:
            self.teachers[0].register_forward_hook(lambda *_: torch.ones(1))
        return 1 + self.teachers[0](batch).detach().mean().abs()
