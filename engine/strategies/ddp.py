"""One full replica per process, gradients averaged during backward."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import embedding
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from midstride.engine.config.options import TrainerOptions
from midstride.engine.errors import UserError
from midstride.engine.formatting import format_names
from midstride.engine.strategies.gradient_buckets import GradientBuckets
from midstride.engine.strategies.layer_faults import sparse_layers
from midstride.engine.strategies.mixins import AveragesInBuckets, BackwardSync, ReplicatesParameters, WatchesFrozen
from midstride.engine.strategies.step import TrainingStep
from midstride.engine.strategies.torch_collective import TorchCollective, anywhere, broadcast, start_sum

__all__ = ["Ddp", "zero_loss"]


class Ddp(ReplicatesParameters, BackwardSync, AveragesInBuckets, WatchesFrozen):
    """Replicate the module on every rank (`torch.nn.parallel.DistributedDataParallel`).

    From the second backward pass on, DDP sums gradients in the order in which they became ready in
    the first pass. A resumed process would learn another order, which gives other bits with three
    or more ranks. So the order is recorded, stored in snapshots, and replayed by two synthetic
    backward passes before state is loaded.

    Args:
        find_unused_parameters: steps can leave out parameters. Costs a walk over the graph per step.
        static_graph: every step uses the same parameters in the same way; DDP then skips checks.
        comm_hook: exchange gradients in half the bytes, "bf16_compress" or "fp16_compress".
        sync_batchnorm: normalise over the batches of all ranks; on GPUs.
        gradient_as_bucket_view: gradients are views of the buffers that are exchanged, which saves a copy of them all.
        bucket_cap_mb: size of such a buffer; by default torch's, 25. It decides how sums are made, and so the bits.

    With several optimizers, or with manual optimization, gradients are averaged in buckets of that size outside of
    DDP: parameters can be unused then, and `comm_hook` and `gradient_as_bucket_view` are refused.
    """

    name = "ddp"

    def __init__(
        self,
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        comm_hook: Literal["bf16_compress", "fp16_compress"] | None = None,
        sync_batchnorm: bool = False,
        gradient_as_bucket_view: bool = False,
        bucket_cap_mb: int | None = None,
    ) -> None:
        super().__init__(TorchCollective())
        self._find_unused, self._static_graph = find_unused_parameters, static_graph
        self._comm_hook, self._sync_batchnorm = comm_hook, sync_batchnorm
        self._bucket_view, self._bucket_cap_mb = gradient_as_bucket_view, bucket_cap_mb
        self._order: list[str] | None = None
        self._ready: list[str] = []
        self._wrapped: DistributedDataParallel | None = None
        self._buckets: GradientBuckets | None = None
        self._shares_buffers = True
        self._needed: list[tuple[str, nn.Parameter]] = []

    @property
    def identity(self) -> str:
        """The name, with the options that change how gradients are summed."""
        chosen = {
            "find_unused_parameters": self._find_unused,
            "static_graph": self._static_graph,
            "comm_hook": self._comm_hook,
            "sync_batchnorm": self._sync_batchnorm,
            "bucket_cap_mb": self._bucket_cap_mb,
        }
        options = ", ".join(f"{name}={value}" for name, value in chosen.items() if value)
        return f"{super().identity}({options})" if options else super().identity

    def fit_errors(self, optimizers: Sequence[Optimizer], options: TrainerOptions, batch_size: int | None) -> list[str]:
        """Return messages on static graphs with accumulation, and on ZeroRedundancyOptimizer."""
        faults, window = [], options.accumulate_grad_batches
        if self._static_graph and window > 1:
            faults.append(
                f"strategy_args: static_graph with accumulate_grad_batches={window}: leave static_graph out. DDP "
                "learns the graph from its first batch, whose gradients are not exchanged inside a window"
            )
        # By the name of its class, since its import takes a second.
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for one in optimizers for kind in type(one).__mro__):
            faults.append(
                "a ZeroRedundancyOptimizer keeps a part of its state on each rank: use its inner optimizer with "
                "strategy sharded, which shards the state, too"
            )
        return faults

    def wrap(self, step: TrainingStep, *, one_backward: bool) -> nn.Module:
        """Return `step` in DDP, or unchanged if gradients are exchanged after each backward pass."""
        super().wrap(step, one_backward=one_backward)
        self._order, self._wrapped, self._ready, self._needed, self._buckets = None, None, [], [], None
        self._shares_buffers = True
        if self._sync_batchnorm:
            nn.SyncBatchNorm.convert_sync_batchnorm(step.module)
        if not one_backward:
            self._check_averaging_outside_ddp(step.module)
        if not one_backward or not any(p.requires_grad for p in step.parameters()):
            broadcast(step)
            have_any, bucket_bytes = partial(anywhere, device=self.device), (self._bucket_cap_mb or 25) << 20
            self._buckets = GradientBuckets(start_sum(), self.world.size, have_any, bucket_bytes)
            return step
        self._wrapped = DistributedDataParallel(
            _Replayable(step),
            device_ids=None,  # the batch is on the device; DDP would rebuild its containers, which fails for some
            find_unused_parameters=self._find_unused,
            static_graph=self._static_graph,
            gradient_as_bucket_view=self._bucket_view,
            bucket_cap_mb=self._bucket_cap_mb,
        )
        if not (self._find_unused or self._static_graph):
            self._needed = [(name, p) for name, p in step.module.named_parameters() if p.requires_grad]
        self.watch_frozen(step.module)
        if self._comm_hook is not None:
            self._wrapped.register_comm_hook(None, getattr(default_hooks, f"{self._comm_hook}_hook"))
        if not self._find_unused:  # with it, DDP keeps its initial order, which is the same in every attempt
            self._record(self._wrapped, step)
        return self._wrapped

    def _check_averaging_outside_ddp(self, module: nn.Module) -> None:
        if sparse := sparse_layers(module):
            raise UserError(
                f"the module's {sparse[0]} has sparse gradients, with several optimizers or manual optimization: build "
                "it with sparse=False. Gradients are then averaged outside of DistributedDataParallel, as dense ones"
            )
        chosen = {"comm_hook": self._comm_hook, "gradient_as_bucket_view": self._bucket_view}
        if refused := ", ".join(name for name, value in chosen.items() if value):
            raise UserError(
                f"strategy_args: {refused} has no effect with several optimizers or manual optimization: leave it out. "
                "Gradients are then averaged outside of DistributedDataParallel"
            )

    @property
    def buckets(self) -> GradientBuckets | None:
        """The buckets in which gradients are averaged outside of DDP; None if DDP averages them."""
        return self._buckets

    def no_backward_sync(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """Keep gradients on this rank while the block runs."""
        if isinstance(wrapped, DistributedDataParallel):
            return cast("AbstractContextManager[Any]", wrapped.no_sync())
        return nullcontext()

    def reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Average gradients in buckets of a fixed layout, which have the same bits in every attempt."""
        if self._buckets is None:
            self._ensure_complete()
        else:
            self._buckets.average(parameters)

    def sync_pending_gradients(self) -> None:
        """Exchange the gradients of a window whose last batch has none.

        This is a synthetic backward pass through DDP.
        """
        if self._wrapped is not None:
            named = self._wrapped.module.step.module.named_parameters()
            self._wrapped(replay=[name for name, p in named if p.grad is not None]).backward()

    def state_dict(self) -> dict[str, Any]:
        """Return the order of rank 0's gradients, and True if the next forward broadcasts buffers.

        DDP does not broadcast buffers within an accumulation window.
        """
        shares = self._shares_buffers if self._wrapped is None else self._wrapped.require_forward_param_sync
        return {"gradient_order": self._order or self._ready or None, "shares_buffers": shares}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Replay the order, so that gradients are summed as in the earlier attempt."""
        self._order, self._shares_buffers = state_dict["gradient_order"], state_dict["shares_buffers"]
        if self._wrapped is None:
            return
        for _ in range(2 if self._order else 0):  # with a static graph, DDP adopts the order in the second pass
            self._wrapped(replay=self._order).backward()
        for parameter in self._wrapped.parameters():
            parameter.grad = None
        self._wrapped.require_forward_param_sync = self._shares_buffers

    def clone(self) -> Self:
        """Return a copy for loading a state while this one trains: without DDP, without a replay."""
        clone = super().clone()
        clone._wrapped = None
        return clone

    def _ensure_complete(self) -> None:
        """Raise if the backward pass missed parameters: DDP exchanged only some of the gradients.

        Raises:
            UserError: it names parameters without a gradient. DDP itself raises only in the next forward pass.
        """
        if left := [name for name, parameter in self._needed if parameter.grad is None]:
            raise UserError(
                f"{format_names(left, 3)} took no part in the loss of this batch, and strategy ddp waits for the "
                "gradients of all parameters that trained when it was set up. Use them, freeze them before the fit, or "
                'choose strategy_args={"find_unused_parameters": True}; to freeze some later, put them '
                "in a group with lr=0."
            )

    def _record(self, wrapped: DistributedDataParallel, step: TrainingStep) -> None:
        """Record the order of gradients in the first backward pass that exchanges them."""
        named = [(n, p) for n, p in step.module.named_parameters() if p.requires_grad]

        def recorder(name: str) -> Any:
            def record(_: Tensor) -> None:
                if not wrapped.require_backward_grad_sync or self._order is not None:
                    return
                first_pass = name not in self._ready
                if first_pass:
                    self._ready.append(name)
                # With a static graph some parameters can be unused: the first one of the second pass ends the first.
                if not first_pass or len(self._ready) == len(named):
                    self._order = self._ready
                    for handle in handles:
                        handle.remove()

            return record

        handles = [p.register_post_accumulate_grad_hook(recorder(n)) for n, p in named]


class _Replayable(nn.Module):
    """A training step that can also replay an order of gradients, without a call of user code."""

    def __init__(self, step: TrainingStep) -> None:
        super().__init__()
        self.step = step
        self._sparse = {f"{layer}.weight" for layer in sparse_layers(step.module)}

    def forward(self, *args: Any, replay: list[str] | None = None) -> Any:
        if replay is None:
            return self.step(*args)
        parameters = dict(self.step.module.named_parameters())
        # Gradients become ready in the reverse order of use.
        return sum(zero_loss(parameters[name], is_sparse=name in self._sparse) for name in reversed(replay))


def zero_loss(parameter: Tensor, *, is_sparse: bool) -> Tensor:
    """Return a loss of 0 whose gradient for `parameter` is 0 in its layout, dense or sparse."""
    if is_sparse:
        return embedding(parameter.new_zeros(1, dtype=torch.long), parameter, sparse=True).sum() * 0
    return ((torch.view_as_real(parameter) if parameter.is_complex() else parameter) * 0).sum()
