"""State in attributes of modules, and objects that two of them share."""

from collections import deque
from typing import Any

from laws.objects.small import Small
from torch import Tensor, nn


class Dropping(Small):
    """An attribute of one of torch's modules."""

    def build(self) -> None:
        self.drop, self.norm = nn.Dropout(0.1), nn.BatchNorm1d(2)

    def factor(self, batch: Tensor) -> Any:
        self.drop.p += 0.1
        self.norm.momentum = (self.norm.momentum or 0.0) * 0.5
        return self.drop(self.norm(batch)).mean() + 1


class Tagged(Small):
    """A plain attribute set on a container of torch's."""

    def build(self) -> None:
        self.body = nn.Sequential(nn.Linear(2, 1))

    def factor(self, batch: Tensor) -> Any:
        self.body.calls = getattr(self.body, "calls", 0) + 1  # type: ignore[assignment]
        return self.body.calls


class Private(Small):
    def build(self) -> None:
        self._count = 0

    def factor(self, batch: Tensor) -> Any:
        self._count += 1
        return self._count


class Tuned(Small):
    """Hyperparameters that training changes."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def factor(self, batch: Tensor) -> Any:
        self.hparams["gain"] *= 1.5
        return self.hparams["gain"]


class SharedDeque(Small):
    def build(self) -> None:
        self.recent: deque[float] = deque(maxlen=3)
        self.window = self.recent

    def factor(self, batch: Tensor) -> Any:
        self.recent.append(float(batch.sum()))
        return 1 + sum(self.window)


class Part(nn.Module):
    def __init__(self, shared: dict[str, float]) -> None:
        super().__init__()
        self.shared = shared


class SharedDict(Small):
    """A dict that submodules share."""

    def build(self) -> None:
        shared = {"calls": 1.0}
        self.parts = nn.ModuleList(Part(shared) for _ in range(2))

    def factor(self, batch: Tensor) -> Any:
        self.parts[0].shared["calls"] *= 1.5  # type: ignore[union-attr, operator, index]
        return self.parts[1].shared["calls"]  # type: ignore[union-attr, index]


class Hooked(Small):
    """A list that only a hook closes over."""

    def build(self) -> None:
        seen: list[float] = []
        self.layer.register_forward_hook(lambda module, args, output: seen.append(float(output.detach().mean())))
        self.total = lambda: sum(seen)

    def factor(self, batch: Tensor) -> Any:
        return 1 + self.total()


class Scaler:
    """A hook that is an object, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.calls += 1
        return output * self.calls


class HookedByObject(Small):
    """An object that only the hooks of a layer hold, beside a method of the module."""

    def build(self) -> None:
        self.calls = 0
        self.layer.register_forward_hook(Scaler())
        self.layer.register_forward_pre_hook(self.called)

    def called(self, module: nn.Module, args: Any) -> None:
        self.calls += 1

    def factor(self, batch: Tensor) -> Any:
        return self.calls


class Counted(Small):
    """A number that a closure counts."""

    def build(self) -> None:
        count = 0

        def advance() -> int:
            nonlocal count
            count += 1
            return count

        self.advance = advance

    def factor(self, batch: Tensor) -> Any:
        return self.advance()
