"""Evaluations on their own, outside a fit: of a module that is ready, on ranks that have met."""

from typing import Any, Literal

import torch

from midstride.engine.data.loader import ResumableLoader
from midstride.engine.data.resolve import LoaderResolver
from midstride.engine.errors import UserError
from midstride.engine.modules.module import TrainingModule
from midstride.engine.training.context import EvaluationContext
from midstride.engine.training.uneven_ranks import turns, without_trace

__all__ = ["evaluation_feeds", "predict"]


def evaluation_feeds(
    context: EvaluationContext, stage: Literal["validate", "test"], loaders: LoaderResolver
) -> list[ResumableLoader]:
    """Bring the module to where it is evaluated, and return what `stage` reads."""
    _ensure_written(context.module, f"{'validation' if stage == 'validate' else stage}_step")
    context.strategy.place(context.module)
    feeds = loaders.evaluation(stage)
    if not feeds:
        raise UserError(f"there is no {stage} loader: write {'val' if stage == 'validate' else stage}_dataloader.")
    return feeds


def _ensure_written(module: TrainingModule, step: str) -> None:
    kind = type(module)
    if getattr(kind, step) is getattr(TrainingModule, step):
        raise UserError(f"{kind.__name__} has no {step}: nothing would be evaluated. Write it.")


def predict(context: EvaluationContext, loaders: LoaderResolver) -> list[Any]:
    """Return what `predict_step` returns for every batch of this rank."""
    context.strategy.place(context.module)
    context.logged.begin("predict")
    predictions = []
    with torch.no_grad(), context.modes.evaluating():
        for number, feed in enumerate(loaders.evaluation("predict")):
            for index, (batch, own) in enumerate(turns(context, feed)):
                if own:
                    predictions.append(_predicted(context, batch, index, number))
                elif context.strategy.forward_is_collective:
                    with without_trace(context):
                        _predicted(context, batch, index, number)
                context.strategy.mark_step()
    return predictions


def _predicted(context: EvaluationContext, batch: Any, index: int, number: int) -> Any:
    batch = context.to_device(batch)
    context.logged.begin_batch(batch)
    with context.precision.forward():
        return context.strategy.evaluate(context.module, "predict_step", batch, index, number)
