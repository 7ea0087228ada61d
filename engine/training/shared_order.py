"""Whether ranks that share what their samplers give were given the same: else samples are read twice, others never."""

from midstride.engine.data.loader import ResumableLoader
from midstride.engine.errors import UserError
from midstride.engine.strategies.collective import Collective

__all__ = ["ensure_shared_order"]


def ensure_shared_order(collective: Collective, loader: ResumableLoader, where: str, *, reads: bool = True) -> None:
    """Compare what the samplers of the pass under way gave; every rank calls this at its first batch.

    Args:
        collective: of the ranks.
        loader: of this one.
        where: the pass, for the message.
        reads: whether this rank reads in it: one without a batch has run no sampler.

    Raises:
        UserError: they gave different orders.
    """
    if (order := loader.shared_order()) is None:
        return
    orders = [one for is_read, one in collective.gather((reads, order)) if is_read]
    if len({*orders}) > 1:
        raise UserError(
            f"the ranks share what their samplers give, and in {where} those differ (digests {', '.join(orders)}): "
            "each of them was built, or changed in training, alone. Exchange what they are told, by "
            "torch.distributed.all_gather_object or the like, or say use_distributed_sampler=False."
        )
