"""Evaluations outside a fit: what `Trainer.validate`, `test` and `predict` do once module and ranks are ready."""

from functools import partial
from typing import Any, Literal

import torch

from midstride.engine.data.loader import ResumableLoader
from midstride.engine.data.resolve import LOADER_METHODS, LoaderResolver
from midstride.engine.errors import UserError
from midstride.engine.modules.module import TrainingModule
from midstride.engine.strategies.step import STEPS
from midstride.engine.training.context import EvaluationContext
from midstride.engine.training.extra_steps import extra_step
from midstride.engine.training.lane_scope import LaneScope
from midstride.engine.training.uneven_ranks import lockstep_batches
from midstride.engine.trees import to_host

__all__ = ["predict", "setup_evaluation"]


def setup_evaluation(
    context: EvaluationContext, stage: Literal["validate", "test"], loaders: LoaderResolver
) -> list[ResumableLoader]:
    """Set up the module where it is evaluated; return the loaders of `stage`."""
    _ensure_written(context.module, STEPS[stage])
    context.strategy.setup_module(context.module, context.scope)
    resumables = loaders.evaluation(stage)
    if not resumables:
        raise UserError(f"there is no {stage} loader: write {LOADER_METHODS[stage]}.")
    return resumables


def _ensure_written(module: TrainingModule, step: str) -> None:
    kind = type(module)
    if getattr(kind, step) is getattr(TrainingModule, step):
        raise UserError(f"{kind.__name__} has no {step}: nothing would be evaluated. Write it.")


def predict(context: EvaluationContext, loaders: LoaderResolver) -> list[Any]:
    """Return what `predict_step` returns for every batch of this rank, on the host: a device might not hold all."""
    context.strategy.setup_module(context.module, context.scope)
    context.metric_logger.begin("predict")
    lanes = None if context.lanes is None else LaneScope(context, "predict")
    context.hooks.call("on_predict_start")
    context.hooks.call("on_predict_epoch_start")
    predictions = []
    resumables = loaders.evaluation("predict")
    with torch.no_grad(), context.modes.evaluating():
        for number, loader in enumerate(resumables):
            extra = (number,) if len(resumables) > 1 else ()
            predicted = partial(_predict, context, number=number, extra=extra)
            for index, (batch, own) in enumerate(lockstep_batches(context, loader)):
                if own and lanes is not None:
                    step = partial(_step, context, index=index, number=number, extra=extra)
                    for lane, lane_batch in batch.items():
                        with lanes.lane(lane, step, lane_batch, number, index, loader=number):
                            predictions.append(predicted(lane_batch, index))
                elif own:
                    predictions.append(predicted(batch, index))
                elif context.forward_is_collective:
                    with extra_step(context, loader):
                        predicted(batch, index)
                context.mark_step()
    context.hooks.call("on_predict_epoch_end")
    context.hooks.call("on_predict_end")
    return predictions


def _predict(context: EvaluationContext, batch: Any, index: int, *, number: int, extra: tuple[int, ...]) -> Any:
    batch = context.to_device(batch, number)
    context.hooks.call("on_predict_batch_start", batch, index, *extra)
    outputs = _step(context, batch, index, number=number, extra=extra)
    context.hooks.call("on_predict_batch_end", outputs, batch, index, *extra)
    return outputs if context.device.type == "cpu" else to_host(outputs)


def _step(context: EvaluationContext, batch: Any, index: int, *, number: int, extra: tuple[int, ...]) -> Any:
    run = partial(context.strategy.run_step, context.scope, context.module, STEPS["predict"])
    return context.scope.run(run, context.to_device(batch, number), index, *extra)
