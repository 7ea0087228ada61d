"""Code that imports what it calls where it calls it."""

from typing import Any

from laws.objects.small import Small
from torch import Tensor


class CountsWhereImported(Small):
    warns = r"part of no snapshot: global .*helper\.STEPS \(\d+, now \d+"

    def factor(self, batch: Tensor) -> Any:
        from laws.objects.helper import count

        return count()
