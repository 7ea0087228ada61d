"""What is held by other files of the user's than those that the classes of a training stand in."""

from typing import Any

from laws.objects import helper
from laws.objects.small import Small
from torch import Tensor


class DrawsInHelper(Small):
    def factor(self, batch: Tensor) -> Any:
        return helper.noise()


class CountsInHelper(Small):
    def factor(self, batch: Tensor) -> Any:
        return helper.count()


class CountsOnClassOfHelper(Small):
    def factor(self, batch: Tensor) -> Any:
        return helper.Numbered().number


class SwapsInHelper(Small):
    def factor(self, batch: Tensor) -> Any:
        helper.act = helper.hard
        return helper.act(2.0)
