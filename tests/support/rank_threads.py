"""Ranks that are threads of this process."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from support.limit import LIMIT_S

from midstride.engine.world import World


class Ranks:
    """A world of threads whose gather is a barrier."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=LIMIT_S)
        self._values: list[Any] = [None] * size

    def gather(self, rank: int) -> Callable[[object], list[Any]]:
        def gather(value: object) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
            return values

        return gather

    def run(self, act: Callable[[World, Callable[[object], list[Any]]], Any]) -> list[Any]:
        """Return what every rank returned or raised."""

        def one(rank: int) -> Any:
            try:
                return act(World(rank=rank, size=self.size), self.gather(rank))
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, range(self.size)))
