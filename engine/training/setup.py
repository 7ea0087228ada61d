"""What is set up before a stage, and taken down after it: the data and the module."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from midstride.engine.session.heartbeat import Heartbeat, Phase
from midstride.engine.strategies.base import Strategy
from midstride.engine.user_code import call_user_code

__all__ = ["set_up"]


@contextmanager
def set_up(owners: Sequence[Any], stage: str, strategy: Strategy, heartbeat: Heartbeat) -> Iterator[None]:
    """Prepare data once on each machine, set up in every rank, and take down again what went well.

    Args:
        owners: a DataModule and a module, as far as there are such.
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
    strategy.gather(None)
    call("setup", stage)
    yield
    call("teardown", stage)
