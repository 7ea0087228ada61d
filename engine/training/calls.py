"""One call of a Trainer: alone with its module, seeded, set up and torn down."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from midstride.engine.errors import UserError
from midstride.engine.modules.callbacks import Callback
from midstride.engine.modules.interface import TrainerInterface
from midstride.engine.modules.module import TrainingModule
from midstride.engine.seeds import DeviceGenerator, seed_everything
from midstride.engine.session.heartbeat import Heartbeat, Phase
from midstride.engine.strategies.base import Strategy
from midstride.engine.user_code import call_user_code

__all__ = ["BoundCallback", "ensure_not_running", "running_call", "seed_call", "set_up"]


@dataclass(frozen=True)
class BoundCallback:
    """Calls a callback's `setup` and `teardown`, if any, with the arguments of a module's."""

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
    """Call `prepare_data` once per machine, `setup` on every rank, `teardown` at the end.

    `teardown` is not called if the block raises.

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


#: Trainer, module and verb of each call, the innermost last
_CALLS: ContextVar[tuple[tuple[TrainerInterface, TrainingModule, str], ...]] = ContextVar("midstride_calls", default=())


@contextmanager
def running_call(trainer: TrainerInterface, module: TrainingModule, verb: str) -> Iterator[None]:
    """Register a call of `trainer` with `module` while the block runs."""
    token = _CALLS.set((*_CALLS.get(), (trainer, module, verb)))
    try:
        yield
    finally:
        _CALLS.reset(token)


def ensure_not_running(trainer: TrainerInterface, module: TrainingModule, verb: str) -> None:
    """Refuse a call of `trainer` with `module` inside a running call of one of them.

    Raises:
        UserError: there is such a call, which could not continue correctly.
    """
    parts = [part for part in module.modules() if isinstance(part, TrainingModule)]
    for other, running, outer in _CALLS.get():
        if trainer is other or any(part is one for part in running.modules() for one in parts):
            same = "Trainer" if trainer is other else type(module).__name__
            raise UserError(
                f"trainer.{verb} is called inside trainer.{outer} of the same {same}, which it would change. Pass "
                "loaders to evaluate during a fit as val_dataloaders, or evaluate afterwards, or use another Trainer "
                f"and a copy: Trainer().{verb}(copy.deepcopy(module), ...)."
            )


def seed_call(seed: int, device: DeviceGenerator | None = None) -> None:
    """Seed all generators for a call of a Trainer, except inside another call."""
    if not _CALLS.get():
        seed_everything(seed, device)
