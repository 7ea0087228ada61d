"""Evaluations on their own, outside a fit: of a Trainer that has met the other ranks and has the module ready."""

from typing import TYPE_CHECKING, Any, Literal

import torch

from midstride.engine.data.resolve import Loaders
from midstride.engine.errors import UserError
from midstride.engine.modules.module import TrainingModule
from midstride.engine.modules.progress import Progress
from midstride.engine.training.loops import EvaluationLoop
from midstride.engine.training.uneven_ranks import turns, without_trace

if TYPE_CHECKING:
    from midstride.engine.training.trainer import Trainer

__all__ = ["evaluate", "predict"]


def evaluate(trainer: "Trainer", stage: Literal["validate", "test"], data: Any) -> dict[str, float]:
    """Return the reduced values of `stage` on `data`, as `Trainer.test` takes them; the fit before keeps its place."""
    _ensure_written(trainer, f"{'validation' if stage == 'validate' else stage}_step")
    trainer.strategy.place(trainer.module)
    loaders = Loaders(trainer, trainer.module, evaluate=data).evaluation(stage)
    if not loaders:
        raise UserError(f"there is no {stage} loader: write {'val' if stage == 'validate' else stage}_dataloader.")
    trainer.recorder = None
    fitted, trainer.progress = trainer.progress, Progress()
    try:
        return EvaluationLoop(trainer, stage, loaders).run()
    finally:
        trainer.progress = fitted


def _ensure_written(trainer: "Trainer", step: str) -> None:
    kind = type(trainer.module)
    if getattr(kind, step) is getattr(TrainingModule, step):
        raise UserError(f"{kind.__name__} has no {step}: nothing would be evaluated. Write it.")


def predict(trainer: "Trainer", data: Any) -> list[Any]:
    """Return what `predict_step` returns for every batch of this rank."""
    trainer.strategy.place(trainer.module)
    trainer.logged.begin("predict")
    predictions = []
    with torch.no_grad(), trainer.modes.evaluating():
        for number, loader in enumerate(Loaders(trainer, trainer.module, evaluate=data).evaluation("predict")):
            for index, (batch, own) in enumerate(turns(trainer, loader)):
                if own:
                    predictions.append(_predicted(trainer, batch, index, number))
                elif trainer.strategy.forward_is_collective:
                    with without_trace(trainer):
                        _predicted(trainer, batch, index, number)
                trainer.strategy.mark_step()
    return predictions


def _predicted(trainer: "Trainer", batch: Any, index: int, number: int) -> Any:
    trainer.logged.batch = batch = trainer.received(batch)
    with trainer.precision.forward():
        return trainer.strategy.evaluate(trainer.module, "predict_step", batch, index, number)
