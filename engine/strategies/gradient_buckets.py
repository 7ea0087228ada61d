"""Averages gradients by buckets, the first ones during the backward pass, without DDP.

The content and order of buckets depend only on the trained parameters, so sums have the same bits in all attempts. The
time at which a bucket is sent affects no bits; over gloo each rank chooses it.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from midstride.engine.errors import NotExact
from midstride.engine.strategies.flat_tensors import bucket_indices
from midstride.engine.strategies.torch_internals import version_of

__all__ = ["Exchange", "GradientBuckets"]


class Exchange(Protocol):
    """A started in-place sum over the ranks, such as torch's `Work`."""

    def is_completed(self) -> bool:
        """Return whether the sum is there."""
        ...

    def wait(self) -> object:
        """Return when it is."""
        ...


class GradientBuckets:
    """Averages the gradients of parameters over the ranks.

    A parameter without a gradient on this rank counts as zero if it has one elsewhere, and keeps none if it has none
    anywhere.

    Args:
        start: starts the sum of a flat tensor under a bucket's name, in one order on all ranks.
        divisor: of the sums.
        anywhere: returns for each parameter whether any rank has its gradient, given those of this rank. Without it a
            1 or 0 for each follows the gradients, and 16 bits are summed as 32.
        bucket_bytes: of gradients that travel together. It decides how sums are made, and so the bits.
    """

    def __init__(
        self,
        start: Callable[[Tensor, str], Exchange],
        divisor: int = 1,
        anywhere: Callable[[list[bool]], list[bool]] | None = None,
        bucket_bytes: int = 25 << 20,
    ) -> None:
        self._start, self._divisor, self._anywhere, self._bucket_bytes = start, divisor, anywhere, bucket_bytes
        self._plans: dict[tuple[int, ...], _Plan] = {}
        self._hooked: set[int] = set()
        self._running: _Plan | None = None
        #: that of the last backward pass, until its gradients are averaged
        self._pending: _Plan | None = None

    @contextmanager
    def backward(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Send buckets that the backward pass completes. Call `average` on the same parameters next."""
        plan = self._running = self._plan(parameters)
        plan.begin()
        try:
            yield
        finally:
            self._running = None
        self._pending = plan

    @torch.no_grad()
    def average(self, parameters: Iterable[Tensor]) -> None:
        """Make the gradients of `parameters` that train their means over the ranks.

        Raises:
            NotExact: one changed after it had been sent.
        """
        plan, self._pending = self._pending or self._plan(parameters), None
        plan.check()
        has = [parameter.grad is not None for parameter in plan.parameters]
        used = None if self._anywhere is None else self._anywhere(has)
        while (number := len(plan.sent)) < len(plan.buckets):
            if used is None or any(used[i] for i in plan.buckets[number]):
                self._send(plan)
            else:
                plan.sent.append(None)
        for bucket, sent in zip(plan.buckets, plan.sent, strict=True):
            if sent is not None:
                self._finish(sent, [plan.parameters[i] for i in bucket], used and [used[i] for i in bucket])
        plan.end()

    def _plan(self, parameters: Iterable[Tensor]) -> "_Plan":
        trained = [p for p in parameters if p.requires_grad]
        ids = tuple(map(id, trained))
        if (plan := self._plans.get(ids)) is None:
            plan = self._plans[ids] = _Plan(trained, self._bucket_bytes, f"gradients/{len(self._plans)}")
            for parameter in trained:
                if id(parameter) not in self._hooked:
                    self._hooked.add(id(parameter))
                    parameter.register_post_accumulate_grad_hook(partial(_note, weakref.ref(self)))
        return plan

    def note(self, parameter: Tensor) -> None:
        """Note that the gradient of `parameter` is there, and send the bucket that waited for it."""
        if (plan := self._running) is None:
            return
        plan.note(parameter)
        while plan.can_send():
            self._send(plan)

    @torch.no_grad()
    def _send(self, plan: "_Plan") -> None:
        number = len(plan.sent)
        parameters = [plan.parameters[i] for i in plan.buckets[number]]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        parts = [gradient.reshape(-1) for gradient in gradients]
        if self._anywhere is None:
            parts.append(torch.tensor([float(p.grad is not None) for p in parameters], device=parts[0].device))
        flat = torch.cat(parts)
        plan.sent.append(_Sent(gradients, flat, self._start(flat, f"{plan.name}/{number}")))

    def _finish(self, sent: "_Sent", parameters: Sequence[Tensor], used: Sequence[bool] | None) -> None:
        sent.exchange.wait()
        if self._divisor != 1:
            sent.flat /= self._divisor
        sizes = [parameter.numel() for parameter in parameters]
        *means, flags = sent.flat.split([*sizes, sent.flat.numel() - sum(sizes)])
        for parameter, gradient, mean, has in zip(
            parameters, sent.gradients, means, flags.tolist() if used is None else used, strict=True
        ):
            if has:
                parameter.grad = gradient.copy_(mean.view_as(gradient))


@dataclass
class _Sent:
    """A bucket on its way: the gradients, and themselves once more as one tensor."""

    gradients: list[Tensor]
    flat: Tensor
    exchange: Exchange


class _Plan:
    """Buckets for one choice of parameters, and the progress of a backward pass.

    The first pass only shows which gradients change after they were there, as those of a segment that
    `torch.utils.checkpoint` runs again with use_reentrant=True: their buckets are never sent early.
    """

    def __init__(self, parameters: list[Tensor], bucket_bytes: int, name: str) -> None:
        self.parameters, self.name = parameters, name
        last = len(parameters) - 1  # gradients become ready in the reverse of the order of use
        self.buckets = [
            [last - i for i in reversed(bucket)] for bucket in bucket_indices(parameters[::-1], bucket_bytes)
        ]
        self._index = {id(parameter): i for i, parameter in enumerate(parameters)}
        self._bucket_of = {i: number for number, bucket in enumerate(self.buckets) for i in bucket}
        self._late: set[int] = set()
        self._is_first = True
        self.begin()

    def begin(self) -> None:
        """Have nothing, and send nothing yet."""
        self._ready: dict[int, tuple[Tensor, int]] = {}
        self._missing = [len(bucket) + (number in self._late) for number, bucket in enumerate(self.buckets)]
        self.sent: list[_Sent | None] = []

    def end(self) -> None:
        """Record late gradients."""
        self._is_first = False
        self.begin()

    def note(self, parameter: Tensor) -> None:
        """Note that the gradient of `parameter` is there."""
        index = self._index.get(id(parameter))
        if index is None or index in self._ready or parameter.grad is None:
            return
        self._ready[index] = parameter.grad, version_of(parameter.grad)
        self._missing[self._bucket_of[index]] -= 1

    def can_send(self) -> bool:
        """Return True if the next bucket is complete and, on the CPU, the previous one has arrived.

        NCCL needs one order of all exchanges on all ranks, including those of `sync_batchnorm` in the backward pass. So
        on GPUs no arrival decides.
        """
        number = len(self.sent)
        if self._is_first or number == len(self.buckets) or self._missing[number]:
            return False
        before = self.sent[-1] if self.sent else None
        return before is None or before.flat.device.type == "cuda" or before.exchange.is_completed()

    def check(self) -> None:
        """Find gradients that changed after they were there.

        Raises:
            NotExact: one of them had been sent.
        """
        for index, (gradient, version) in self._ready.items():
            parameter, number = self.parameters[index], self._bucket_of[index]
            if parameter.grad is gradient and version_of(gradient) == version:
                continue
            if number < len(self.sent):
                raise NotExact(
                    f"a gradient of shape {tuple(parameter.shape)} changed after it was sent to the other ranks: "
                    "change gradients in on_before_optimizer_step. With torch.utils.checkpoint, set "
                    "use_reentrant=False."
                )
            self._late.add(number)


def _note(buckets: "weakref.ref[GradientBuckets]", parameter: Tensor) -> None:
    """Tell the buckets, if they still exist. A module keeps the hooks of each fit."""
    if (there := buckets()) is not None:
        there.note(parameter)
