"""One full replica per process, gradients averaged during backward."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from midstride.engine.errors import NotExact, WorldError
from midstride.engine.strategies.base import Strategy, TrainingStep

__all__ = ["Ddp"]

#: a rank may still be importing, or reading its first batch, while the others wait
TIMEOUT = timedelta(minutes=30)


class Ddp(Strategy):
    """Replicate the module on every rank (`torch.nn.parallel.DistributedDataParallel`).

    From the second backward pass on, DDP sums gradients in the order in which they became ready in
    the first. A resumed process has no first pass to learn from and would sum in another order,
    which at three ranks and more gives other bits. So that order is recorded, belongs to a
    snapshot, and is replayed by two synthetic backward passes before state is loaded.
    """

    name = "ddp"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._order: list[str] | None = None
        self._wrapped: DistributedDataParallel | None = None
        self._parameters: set[str] = set()

    def init_process_group(self) -> None:
        """Meet the other ranks over NCCL on GPUs and gloo elsewhere."""
        if dist.is_initialized():
            return
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, rank=self.world.rank, world_size=self.world.size, timeout=TIMEOUT)
        except (RuntimeError, ValueError) as error:
            raise WorldError(
                f"rank {self.world.rank} of {self.world.size} could not meet the others over {backend}: {error}"
            ) from error

    def wrap(self, step: TrainingStep, *, one_backward: bool) -> nn.Module:
        """Return `step` inside DDP, or as it is when gradients are exchanged after each backward pass."""
        self._order, self._wrapped = None, None
        self._parameters = {name for name, _ in step.module.named_parameters(remove_duplicate=False)}
        if not one_backward or not any(p.requires_grad for p in step.parameters()):
            _broadcast(step)
            return step
        # DDP takes no device ids on CPU and exactly one elsewhere.
        ids = None if self.device.type == "cpu" else [self.device]
        self._wrapped = DistributedDataParallel(_Replayable(step.module), device_ids=ids)
        self._record(self._wrapped)
        return self._wrapped

    def gather(self, value: object) -> list[Any]:
        """Return every rank's `value`, in the order of ranks."""
        values: list[Any] = [None] * self.world.size
        dist.all_gather_object(values, value)
        return values

    def accumulate(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """Keep gradients on this rank while the block runs."""
        if isinstance(wrapped, DistributedDataParallel):
            return cast("AbstractContextManager[Any]", wrapped.no_sync())
        return super().accumulate(wrapped)

    def reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Average gradients in one flat buffer of a fixed layout, which has the same bits in every life."""
        if self._wrapped is not None:
            return
        every = [p for p in parameters if p.requires_grad]
        has = torch.tensor([p.grad is not None for p in every], dtype=torch.uint8, device=self.device)
        dist.all_reduce(has, op=dist.ReduceOp.MAX)
        used = [p for p, anywhere in zip(every, has.tolist(), strict=True) if anywhere]
        if not used:
            return
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in used]
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat)
        flat /= self.world.size
        for parameter, part in zip(used, flat.split([p.numel() for p in used]), strict=True):
            parameter.grad = part.view_as(parameter).clone()

    def is_replicated(self, path: str) -> bool:
        """Parameters and what optimizers keep of them are alike on every rank; buffers are each rank's own."""
        kind, _, name = path.partition("/")
        return kind == "optimizers" or (kind == "module" and name in self._parameters)

    def state_dict(self) -> dict[str, Any]:
        """Return the order in which rank 0's gradients became ready in its first backward pass."""
        return {"gradient_order": self._order}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Replay the order, so that gradients are summed as they were in the life before."""
        self._order = state_dict["gradient_order"]
        if self._order is None or self._wrapped is None:
            return
        for _ in range(2):  # DDP rebuilds its buckets between the first and the second
            self._wrapped(None, replay=self._order).backward()
        for parameter in self._wrapped.parameters():
            parameter.grad = None

    def _record(self, wrapped: DistributedDataParallel) -> None:
        """Note the order of gradients in the first backward pass that exchanges them."""
        order: list[str] = []
        named = [(n, p) for n, p in wrapped.module.module.named_parameters() if p.requires_grad]

        def noted(name: str) -> Any:
            def note(_: Tensor) -> None:
                if not wrapped.require_backward_grad_sync or self._order is not None:
                    return
                order.append(name)
                if len(order) == len(named):
                    self._order = order
                    for handle in handles:
                        handle.remove()

            return note

        handles = [p.register_post_accumulate_grad_hook(noted(n)) for n, p in named]


class _Replayable(TrainingStep):
    """A training step that can also replay an order of gradients, without touching the user's code."""

    def forward(self, *args: Any, replay: list[str] | None = None) -> Any:
        if replay is None:
            return super().forward(*args)
        parameters = dict(self.module.named_parameters())
        if any(parameters[name].is_sparse for name in replay):
            raise NotExact("sparse parameters under ddp: the order of their gradients cannot be replayed.")
        # Gradients become ready in the reverse of the order of use.
        return sum((parameters[name] * 0).sum() for name in reversed(replay))


def _broadcast(step: TrainingStep) -> None:
    """Start every rank from rank 0's weights and buffers, as DDP does."""
    with torch.no_grad():
        for tensor in [*step.parameters(), *step.buffers()]:
            dist.broadcast(tensor, 0)
