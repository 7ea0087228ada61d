"""Memory that comes to be shared in training."""

from typing import Any

import numpy as np
import torch
from laws.objects.small import Small
from torch import Tensor


class SplitLate(Small):
    """Views of tensors that each attempt builds, made in training; in the order of names before and after them."""

    def build(self) -> None:
        self.first, self.last = torch.zeros(4), torch.zeros(4)
        self.half: Tensor | None = None

    def factor(self, batch: Tensor) -> Any:
        if self.half is None:
            self.half, self.early = self.first[1:3], self.last[1:3]
        for whole, half in ((self.first, self.half), (self.last, self.early)):
            whole += 1
            half *= 2
        return self.first.sum() + self.last.sum()


class SlicedLate(Small):
    """A view of an array, made in training."""

    warns = r"training made these share memory and writes into it: module\.base, module\.half\."

    def build(self) -> None:
        self.base = np.zeros(4)
        self.half: Any = None

    def factor(self, batch: Tensor) -> Any:
        if self.half is None:
            self.half = self.base[:2]
        self.base += 1
        self.half *= 2
        return float(self.base.sum())
