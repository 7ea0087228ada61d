"""Extra steps and batches, which are not part of the run: their effects are reverted."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from midstride.engine.data.loader import ResumableLoader
from midstride.engine.objects.object_state import side_effects_reverted
from midstride.engine.seeds import Generators
from midstride.engine.training.checkpointing.roots import evaluated_objects
from midstride.engine.training.context import EvaluationContext

__all__ = ["extra_step", "peek_batch"]


@contextmanager
def extra_step(context: EvaluationContext, loader: ResumableLoader) -> Iterator[None]:
    """Discard values logged in the block, and revert its changes of the module, of generators and of user objects.

    Args:
        context: context of the step.
        loader: loader of its batch.
    """
    generators = Generators(context.generator, devices=context.strategy.devices)
    objects = evaluated_objects(context, loader)
    with side_effects_reverted(context.module, generators, objects), context.metric_logger.muted():
        yield


def peek_batch(context: EvaluationContext, loader: ResumableLoader) -> Any:
    """Return the first batch of `loader`, and restore the state of samplers and data."""
    before = loader.state_dict()
    with extra_step(context, loader):
        batch = context.batch_transfer()(next(loader.batches(0)))
    loader.load_state_dict(before)
    return batch
