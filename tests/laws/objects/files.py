"""What is held by other files of the user's than those that the classes of a training stand in."""

from typing import Any

from laws.objects import helper
from laws.objects.small import Small
from torch import Tensor


class DrawsInHelper(Small):
    def factor(self, batch: Tensor) -> Any:
        return helper.noise()


class CountsInHelper(Small):
    warns = r"part of no snapshot: global .*helper\.STEPS \(\d+, now"

    def factor(self, batch: Tensor) -> Any:
        return helper.count()


class CountsOnClassOfHelper(Small):
    warns = r"part of no snapshot: class Numbered: ids \(count\(\d+\), now count\("

    def factor(self, batch: Tensor) -> Any:
        return helper.Numbered().number


class SwapsInHelper(Small):
    warns = r"part of no snapshot: global .*helper\.act \(\S+:soft, now \S+:hard\)"

    def factor(self, batch: Tensor) -> Any:
        helper.act = helper.hard
        return helper.act(2.0)
