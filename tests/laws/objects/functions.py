"""Functions that training chooses, moves and makes."""

import types
from typing import Any

from laws.objects.small import Small
from torch import Tensor


def soft(value: float) -> float:
    return value


def hard(value: float) -> float:
    return 3 * value


class Chooses(Small):
    """Another function of the file is taken, and those of a list and of a dict change places."""

    def build(self) -> None:
        def five() -> float:
            return 5.0

        self.count = 0
        self.acts = [self.one, self.two, lambda: self.count * 0.2]
        self.by_name: dict[str, Any] = {"now": self.one, "then": five}
        self.act: Any = soft

    def one(self) -> float:
        self.count += 1
        return self.count

    def two(self) -> float:
        return self.count * 0.5

    def factor(self, batch: Tensor) -> Any:
        self.acts.append(self.acts.pop(0))
        names = "now", "then"
        self.by_name.update(zip(names, [self.by_name[name] for name in reversed(names)], strict=True))
        self.act = hard
        return self.act(self.acts[0]() + self.by_name["now"]())


class Appends(Small):
    """A list gets another function at every step."""

    def build(self) -> None:
        self.acts: list[Any] = []

    def factor(self, batch: Tensor) -> Any:
        self.acts.append(lambda: 1.0)
        return len(self.acts)


class Patched(Small):
    """An object gets a method of its own."""

    def factor(self, batch: Tensor) -> Any:
        self.gain = types.MethodType(lambda self: 2.0, self)  # type: ignore[method-assign]
        return self.gain()

    def gain(self) -> float:
        return 1.0


class Linked(Small):
    """A list that is linked, as long as training."""

    def build(self) -> None:
        self.newest: Any = None
        for number in range(2000):
            self.newest = (number, self.newest)

    def factor(self, batch: Tensor) -> Any:
        self.newest = (float(batch.sum()), self.newest)
        return 1.0
