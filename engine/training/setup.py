"""Calls `setup` and `teardown` of data, callbacks and module around a stage."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from midstride.engine.modules.callbacks import Callback
from midstride.engine.modules.module import TrainingModule
from midstride.engine.session.heartbeat import Heartbeat, Phase
from midstride.engine.strategies.base import Strategy
from midstride.engine.user_code import call_user_code

__all__ = ["BoundCallback", "set_up"]


@dataclass(frozen=True)
class BoundCallback:
    """Calls `setup` and `teardown` of a callback, if it has them, with the arguments of a module's."""

    callback: Callback
    trainer: Any
    module: TrainingModule

    def setup(self, stage: str) -> None:
        """Call `setup` of the callback, if it has one."""
        self._call("setup", stage)

    def teardown(self, stage: str) -> None:
        """Call `teardown` of the callback, if it has one."""
        self._call("teardown", stage)

    def _call(self, name: str, stage: str) -> None:
        if (method := getattr(self.callback, name, None)) is not None:
            where = f"{type(self.callback).__name__}.{name}"
            call_user_code(where, method, self.callback.trainer_view(self.trainer), self.module, stage)


@contextmanager
def set_up(owners: Sequence[Any], stage: str, strategy: Strategy, heartbeat: Heartbeat) -> Iterator[None]:
    """Call `prepare_data` once on each machine, `setup` on every rank, and `teardown` unless the block raises.

    Args:
        owners: DataModule, callbacks and module.
        stage: "fit", "validate", "test" or "predict".
        strategy: strategy whose ranks wait for the data.
        heartbeat: reports that this rank waits.
    """

    def call(name: str, *arguments: str) -> None:
        for owner in owners:
            if (method := getattr(owner, name, None)) is not None:
                call_user_code(f"{type(owner).__name__}.{name}", method, *arguments)

    if strategy.world.local_rank == 0:
        with heartbeat.during(Phase.WAITING):
            call("prepare_data")
    strategy.collective.gather(None)
    call("setup", stage)
    call("configure_model")
    yield
    call("teardown", stage)
