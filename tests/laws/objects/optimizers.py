"""State in optimizers and schedulers."""

import random
from typing import Any

import torch
import torch.nn.utils.prune
from laws.objects.small import Small
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel


class Replaced(Small):
    """A container that is replaced while another name keeps the old one."""

    def build(self) -> None:
        self.now: list[float] = [1.0]
        self.old = self.now

    def factor(self, batch: Tensor) -> Any:
        if len(self.now) > 2:
            self.now = [0.5]
        self.now.append(float(batch.sum()))
        return 1 + sum(self.now) + 10 * sum(self.old)


class Numbered(torch.optim.SGD):
    """Counts beside its `state`."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = 0.01 * self.calls
            group["note"] = self.calls
        return super().step(closure)


class Optimized(Small):
    def configure_optimizers(self) -> Any:
        return Numbered(self.parameters())


def _each_step(optimizer: Any, scheduler: Any) -> Any:
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Lambda(Small):
    """A schedule that closes over what training changes."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        bad = [0]

        def rate(step: int) -> float:
            bad[0] += step
            return 1 / (1 + bad[0])

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return _each_step(optimizer, scheduler)


class Cyclic(Small):
    mode = "triangular"

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2, mode=self.mode)
        return _each_step(optimizer, scheduler)


class Cyclic2(Cyclic):
    mode = "triangular2"


class CyclicRange(Cyclic):
    mode = "exp_range"


class CyclicCounted(Small):
    """A cycle whose scale is a function that closes over what training changes."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        calls = [0]

        def scale(cycle: float) -> float:
            calls[0] += 1
            return 1 / (1 + calls[0])

        scheduler = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2, scale_fn=scale)
        return _each_step(optimizer, scheduler)


class NamedParameters(Small):
    """An optimizer that knows the names of its parameters, and is given another in training."""

    def build(self) -> None:
        self.late = nn.Linear(2, 1)

    def factor(self, batch: Tensor) -> Any:
        if self.global_step == 1:
            named = [(f"late.{name}", parameter) for name, parameter in self.late.named_parameters()]
            self.optimizers().add_param_group({"params": named, "lr": 0.02})
        return 1 + self.late(batch).square().mean()

    def configure_optimizers(self) -> Any:
        named = [(f"layer.{name}", parameter) for name, parameter in self.layer.named_parameters()]
        return torch.optim.SGD(named, lr=0.01, momentum=0.9)


class Wide(torch.optim.Optimizer):
    """Keeps float32 and integers for weights of bfloat16."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                master = state.setdefault("master", parameter.detach().float())
                state.setdefault("calls", torch.zeros((), dtype=torch.int64)).add_(1)
                state.setdefault("nested", {"list": [torch.ones(2)]})["list"][0].mul_(1.01)
                master.sub_(parameter.grad.float(), alpha=group["lr"] / int(state["calls"]))
                parameter.copy_(master)


class Narrow(Small):
    def build(self) -> None:
        self.layer.bfloat16()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch.bfloat16()).square().mean().float()

    def configure_optimizers(self) -> Any:
        return Wide(self.parameters())


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer, whose state its own `state_dict` is; and keeps slow weights beside it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.param_groups, self.steps = inner, inner.param_groups, 0
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.steps += 1
        for p, slow in zip((p for g in self.param_groups for p in g["params"]), self.slow, strict=True):
            if self.steps % 2 == 0:
                p.data.copy_(slow.lerp_(p.data, 0.5))
        return loss


class Wrapping(Small):
    def configure_optimizers(self) -> Any:
        return Lookahead(torch.optim.Adam(self.parameters(), lr=0.01))


class LookaheadInOwnForm(Lookahead):
    """Has a state of a form of its own."""

    def state_dict(self) -> Any:
        inner = self.inner.state_dict()
        return {"fast_state": inner["state"], "slow_state": self.slow, "param_groups": inner["param_groups"]}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict({"state": state_dict["fast_state"], "param_groups": state_dict["param_groups"]})
        self.slow = state_dict["slow_state"]


class WrappingInOwnForm(Small):
    def configure_optimizers(self) -> Any:
        return LookaheadInOwnForm(torch.optim.Adam(self.parameters(), lr=0.01))


class LookaheadWithoutState(Lookahead):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        del self.state


class WrappingWithoutState(Small):
    def configure_optimizers(self) -> Any:
        return LookaheadWithoutState(torch.optim.Adam(self.parameters(), lr=0.01))


class Warmup(torch.optim.lr_scheduler.LRScheduler):
    """Rises, and hands over to another scheduler; what it draws is its own."""

    def __init__(self, optimizer: torch.optim.Optimizer, after: torch.optim.lr_scheduler.LRScheduler) -> None:
        self.after, self.drawn, self.share = after, random.Random(3), lambda step: (step + 1) / 3
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        if self.last_epoch > 2:
            self.after.step()
        rate = float(self.after.get_last_lr()[0])
        return [rate * self.share(min(2, self.last_epoch)) * (1 + self.drawn.random())]


class Warming(Small):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return _each_step(optimizer, Warmup(optimizer, after))


INNER: list[torch.optim.lr_scheduler.LRScheduler] = []


class HoldsInner(Small):
    """A global holds the schedulers in another one, whose state has theirs."""

    def factor(self, batch: Tensor) -> Any:
        INNER[1].gamma *= 0.9  # type: ignore[attr-defined]  # of the class below
        return 1.0

    def configure_optimizers(self) -> Any:
        optimizer, kinds = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9), torch.optim.lr_scheduler
        INNER[:] = [kinds.LinearLR(optimizer, 0.1, total_iters=2), kinds.ExponentialLR(optimizer, 0.5)]
        return _each_step(optimizer, kinds.SequentialLR(optimizer, INNER, [2]))


class TakesAnother(Small):
    """Steps by hand, from the second step on with an optimizer and a scheduler that are made then."""

    automatic_optimization = False

    def build(self) -> None:
        self.second: Any = None
        self.rate: Any = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        if self.global_step >= 1:
            self.second = self.second or torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
            self.rate = self.rate or torch.optim.lr_scheduler.StepLR(self.second, 1, 0.5)
            self.second.zero_grad()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        if self.second is not None:
            self.second.step()
            self.rate.step()
        return loss


class WithoutOptimizer(Small):
    """Changes its weights by a rule of its own, with what it remembers of the gradients."""

    automatic_optimization = False

    def build(self) -> None:
        self.speed = torch.zeros(2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.layer.zero_grad()
        self.manual_backward(loss)
        self.speed = 0.9 * self.speed + self.layer.weight.grad[0]
        with torch.no_grad():
            self.layer.weight -= 0.01 * self.speed
        return loss

    def configure_optimizers(self) -> Any:
        return None


class TogglesForTwoSteps(Small):
    """Two optimizers by hand, of which each trains for two steps, while the other's parameters collect no gradients."""

    automatic_optimization = False

    def build(self) -> None:
        self.second = torch.nn.Parameter(torch.ones(()))

    def factor(self, batch: Tensor) -> Any:
        return self.second

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        turn, has_ended = divmod(self.global_step + 1, 2)
        optimizer = self.optimizers()[turn % 2]
        if not has_ended:
            self.toggle_optimizer(optimizer)
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.5)
        optimizer.step()
        if has_ended:
            self.untoggle_optimizer(optimizer)
            assert all(p.requires_grad for p in self.parameters())
        return loss

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(p, lr=0.01, momentum=0.9) for p in (self.layer.parameters(), [self.second])]


class _TwoGroups(Small):
    def build(self) -> None:
        self.second = torch.nn.Parameter(torch.ones(()))

    def factor(self, batch: Tensor) -> Any:
        return self.second

    def configure_optimizers(self) -> Any:
        groups = [{"params": [self.second], "lr": 0.1}, {"params": self.layer.parameters()}]
        return torch.optim.SGD(groups, lr=0.01)


class TakesAway(_TwoGroups):
    """Ends to train a group after the first step."""

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 0:
            (optimizer,) = self.trainer.optimizers
            optimizer.param_groups.pop(0)


class Defaulting(_TwoGroups):
    """A group that is added has the defaults of then."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layer.parameters(), lr=0.01)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        (optimizer,) = self.trainer.optimizers
        optimizer.defaults["lr"] *= 2
        if batch_idx == 2:
            optimizer.add_param_group({"params": [self.second]})


class SkipsGradients(Small):
    """Leaves the gradients of a step out, the first one of the life that resumes."""

    def on_after_backward(self) -> None:
        if self.global_step == 2:
            self.zero_grad()


class BeginsToAverage(Small):
    """Begins, after the first step, to average weights, with a schedule of its own: both hold functions of torch."""

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 0:
            self.averages = [AveragedModel(self.layer)]
            self.rates = SWALR(self.trainer.optimizers[0], 0.05, anneal_epochs=4)
        else:
            self.averages[0].update_parameters(self.layer)
            self.rates.step()


class HoldsGroup(Small):
    """Sets a learning rate through the group that it was built with."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        self.group = optimizer.param_groups[0]
        return optimizer

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.group["lr"] *= 0.5
        assert self.group is self.trainer.optimizers[0].param_groups[0]
