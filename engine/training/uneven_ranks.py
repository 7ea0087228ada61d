"""Evaluation in lockstep: all ranks take as many turns as the rank with the most batches.

If a call of the module is a collective, a rank without a batch left repeats one; the effects of that are reverted.
"""

from collections.abc import Iterator
from itertools import count
from typing import Any

from midstride.engine.data.loader import ResumableLoader
from midstride.engine.strategies.collective import Collective
from midstride.engine.training.context import EvaluationContext
from midstride.engine.training.shared_order import ensure_shared_order

__all__ = ["lockstep_batches"]

_NONE = object()  # a batch may be None


def lockstep_batches(context: EvaluationContext, loader: ResumableLoader, start: int) -> Iterator[tuple[Any, bool]]:
    """Yield pairs of a batch and whether it is this rank's own, from batch `start` on.

    If not, the batch is one to repeat if calls of the module are collectives, and otherwise a placeholder.
    """
    collective, batches = context.collective, loader.batches(0, start)
    spare: Any = None
    for index in count(start):
        context.inject_fault("validation")
        batch = next(batches, _NONE)
        own = batch is not _NONE
        # Without a length, the ranks agree on the end.
        if index >= loader.max_batches if loader.is_sized else collective.all_agree(not own):
            return
        if index == 0:
            ensure_shared_order(collective, loader, "an evaluation", reads=own)
        if not context.forward_is_collective:
            yield batch, own
            continue
        if own:
            spare = batch
        if index == start:
            spare = _batch_of_another(collective, spare, own)
        yield spare, own


def _batch_of_another(collective: Collective, batch: Any, own: bool) -> Any:
    """Return `batch` if every rank has one of its own, else that of the first rank that has."""
    if collective.all_agree(own):
        return batch
    theirs = [one for has, one in collective.gather((own, batch)) if has]
    return batch if own else theirs[0]
