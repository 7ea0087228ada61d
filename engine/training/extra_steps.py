"""Steps that a rank takes only so that other ranks can take theirs: nothing of them stays."""

from collections.abc import Iterator
from contextlib import contextmanager

from midstride.engine.data.loader import ResumableLoader
from midstride.engine.objects.side_effects import side_effects_reverted
from midstride.engine.seeds import Generators
from midstride.engine.training.checkpointing.roots import evaluated_objects
from midstride.engine.training.context import EvaluationContext

__all__ = ["extra_step"]


@contextmanager
def extra_step(context: EvaluationContext, loader: ResumableLoader) -> Iterator[None]:
    """Drop what is logged within, and put back what a step of an evaluation updated, drew or kept.

    Args:
        context: of the evaluation.
        loader: whose batch is repeated.
    """
    generators = Generators(context.generator, devices=context.strategy.devices)
    objects = evaluated_objects(context, loader)
    with side_effects_reverted(context.module, generators, objects), context.metric_logger.muted():
        yield
