"""Under which names a value is kept that `self.log` is given."""

from typing import Literal, NamedTuple

from midstride.engine.errors import UserError
from midstride.engine.metrics.accumulator import REDUCTIONS

__all__ = ["LogRequest", "LogTarget", "LoggingStage", "log_target"]

#: what is going on
LoggingStage = Literal["train", "validate", "test", "predict"]

#: name, on_step, on_epoch, prog_bar, sync_dist, reduce_fx, add_dataloader_idx: as `TrainingModule.log` was given them
LogRequest = tuple[str, bool | None, bool | None, bool, bool, str, bool]


class LogTarget(NamedTuple):
    """What `self.log` was asked for, understood: under which names, if any, a value is kept."""

    step: str
    epoch: str
    also: str
    sync: bool
    reduce_fx: str
    #: a step's value of this rank alone, the common case
    plain: bool


def log_target(asked: LogRequest, stage: LoggingStage, loader: int | None, *, stepping: bool) -> LogTarget:
    """Return what was asked for, understood.

    Args:
        asked: of `self.log`.
        stage: what is going on.
        loader: number of the loader being evaluated, where there are several.
        stepping: whether a step of training is under way, not a hook of an epoch, or of the whole training.

    Raises:
        UserError: the name is taken, there is no such reduction, or the value would be kept nowhere.
    """
    name, on_step, on_epoch, _, sync, reduce_fx, add_dataloader_idx = asked
    if name in ("epoch", "step"):
        raise UserError(f"self.log({name!r}): the metric log has a column of that name already; use another.")
    if reduce_fx not in REDUCTIONS:
        raise UserError(f"self.log({name!r}): no reduce_fx {reduce_fx!r}; there are: {', '.join(REDUCTIONS)}")
    on_step = stepping if on_step is None else on_step
    on_epoch = not stepping if on_epoch is None else on_epoch
    if not (on_step or on_epoch):
        raise UserError(f"self.log({name!r}, on_step=False): it would be kept nowhere here; say on_epoch=True too.")
    suffix = "" if loader is None or not add_dataloader_idx else f"/dataloader_idx_{loader}"
    return LogTarget(
        step="" if not on_step else f"{name}_step{suffix}" if on_epoch else name + suffix,
        epoch=name + suffix if on_epoch else "",
        also=f"{name}_epoch{suffix}" if on_step and on_epoch else "",
        sync=sync,
        reduce_fx=reduce_fx,
        plain=on_step and stage == "train" and not (sync or on_epoch),
    )
