"""What is set up before a stage, and taken down after it: the data and the module."""

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
    """`setup` and `teardown` of a callback that has them, as those of a module are called."""

    callback: Callback
    trainer: Any
    module: TrainingModule

    def setup(self, stage: str) -> None:
        """Set up the callback, if it has something to set up."""
        self._call("setup", stage)

    def teardown(self, stage: str) -> None:
        """Let it take down what it set up."""
        self._call("teardown", stage)

    def _call(self, name: str, stage: str) -> None:
        if (method := getattr(self.callback, name, None)) is not None:
            where = f"{type(self.callback).__name__}.{name}"
            call_user_code(where, method, self.callback.trainer_view(self.trainer), self.module, stage)


@contextmanager
def set_up(owners: Sequence[Any], stage: str, strategy: Strategy, heartbeat: Heartbeat) -> Iterator[None]:
    """Prepare data once on each machine, set up in every rank, and take down again what went well.

    Args:
        owners: a DataModule, callbacks and a module, as far as there are such.
        stage: "fit", "validate", "test" or "predict"; data are prepared for a fit.
        strategy: through which the ranks wait for the data.
        heartbeat: says that this rank waits.
    """

    def call(name: str, *arguments: str) -> None:
        for owner in owners:
            if (method := getattr(owner, name, None)) is not None:
                call_user_code(f"{type(owner).__name__}.{name}", method, *arguments)

    if stage == "fit" and strategy.world.local_rank == 0:
        with heartbeat.during(Phase.WAITING):
            call("prepare_data")
    strategy.collective.gather(None)
    call("setup", stage)
    call("configure_model")
    yield
    call("teardown", stage)
