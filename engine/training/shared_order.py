"""Checks that samplers of different ranks gave the same order; else samples would be read twice, or never."""

from midstride.engine.data.loader import ResumableLoader
from midstride.engine.errors import UserError
from midstride.engine.strategies.collective import Collective

__all__ = ["ensure_shared_order"]


def ensure_shared_order(collective: Collective, loader: ResumableLoader, where: str, *, reads: bool = True) -> None:
    """Compare the orders that the samplers of this epoch gave; every rank calls this at its first batch.

    Args:
        collective: collective of the ranks.
        loader: loader of this rank.
        where: the epoch or evaluation, for the message.
        reads: whether this rank has a batch; without one it has run no sampler.

    Raises:
        UserError: the orders differ.
    """
    if (order := loader.shared_order()) is None:
        return
    orders = [theirs for has_read, theirs in collective.gather((reads, order)) if has_read]
    if len({*orders}) > 1:
        raise UserError(
            f"the ranks share what their samplers give, and in {where} those differ (digests {', '.join(orders)}): "
            "each of them was built, or changed in training, alone. Exchange what they are told, by "
            "torch.distributed.all_gather_object or the like, or say use_distributed_sampler=False."
        )
