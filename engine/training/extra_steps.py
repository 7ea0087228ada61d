"""Steps and batches that are not the run's own: nothing of them stays."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from midstride.engine.data.loader import ResumableLoader
from midstride.engine.objects.side_effects import side_effects_reverted
from midstride.engine.seeds import Generators
from midstride.engine.training.checkpointing.roots import evaluated_objects
from midstride.engine.training.context import EvaluationContext

__all__ = ["extra_step", "peek_batch"]


@contextmanager
def extra_step(context: EvaluationContext, loader: ResumableLoader) -> Iterator[None]:
    """Drop what is logged within, and put back what a step updated, drew or kept.

    Args:
        context: of the step.
        loader: whose batch it takes.
    """
    generators = Generators(context.generator, devices=context.strategy.devices)
    objects = evaluated_objects(context, loader)
    with side_effects_reverted(context.module, generators, objects), context.metric_logger.muted():
        yield


def peek_batch(context: EvaluationContext, loader: ResumableLoader) -> Any:
    """Return the first batch of `loader`; samplers and data are then as if nothing had been read."""
    before = loader.state_dict()
    with extra_step(context, loader):
        batch = context.to_device(next(loader.batches(0)))
    loader.load_state_dict(before)
    return batch
