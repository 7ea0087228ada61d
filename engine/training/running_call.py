"""The running calls of Trainers in this thread, and what other calls may do in their hooks."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from midstride.engine.errors import UserError
from midstride.engine.modules.interface import TrainerInterface
from midstride.engine.modules.module import TrainingModule
from midstride.engine.seeds import DeviceGenerator, seed_everything

__all__ = ["ensure_not_running", "running_call", "seed_call"]

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
                f"trainer.{verb} is called inside trainer.{outer} of the same {same}, which could not go on as it was. "
                "Give fit what to evaluate along the way as val_dataloaders, one or several, or evaluate afterwards; "
                f"or take another Trainer and a copy: Trainer().{verb}(copy.deepcopy(module), ...)."
            )


def seed_call(seed: int, device: DeviceGenerator | None = None) -> None:
    """Seed all generators for a call of a Trainer, except inside another call, which would get other numbers."""
    if not _CALLS.get():
        seed_everything(seed, device)
