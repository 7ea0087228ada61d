"""The arithmetic a module trains in: 32, bf16, 16 (with a gradient scaler) or 64 bits."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from midstride.engine.trees import convert

__all__ = ["Precision"]


class Precision:
    """Computes and scales losses and turns them into steps.

    Args:
        name: "32", "bf16" (autocast), "16" (autocast with a gradient scaler) or "64".
        device: where the module trains.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self._device = device.type
        self._autocast = {"bf16": torch.bfloat16, "16": torch.float16}.get(name)
        #: whether a gradient scaler stands between losses and steps
        self.scales = name == "16"
        #: whether losses are computed and stepped on as PyTorch does by itself
        self.is_plain = name == "32"
        self._used = False
        self._plain = nullcontext[None]()

    @cached_property
    def _scaler(self) -> torch.amp.GradScaler | None:
        """Scaler, made on first use in a rank: it queries CUDA, after which a process cannot fork."""
        return torch.amp.GradScaler(self._device) if self.scales else None

    def convert(self, module: nn.Module) -> None:
        """Give the module's weights the width they train in."""
        if self.name == "64":
            module.double()

    def batch(self, batch: Any) -> Any:
        """Return `batch` in the width the weights have."""
        return batch if self.name != "64" else convert(batch, _double, _double_other)

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of one forward pass, new each time so that no cached cast is stale."""
        if self.name == "64":
            return _in_doubles()
        if self._autocast is None:
            return self._plain
        return torch.autocast(self._device, dtype=self._autocast)

    def backward(self, loss: Tensor, by: Callable[..., object] = Tensor.backward, **options: Any) -> None:
        """Run the backward pass of `loss` by the user's function `by`, if any, with `options`."""
        by(loss if self._scaler is None else self._scaler.scale(loss), **options)

    def unscale(self, optimizer: Optimizer) -> None:
        """Give gradients their true size again, for clipping and hooks."""
        if self._scaler is not None and _has_gradients(optimizer):
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Step `optimizer`, unless the scaler found an overflow."""
        if self._scaler is None or not _has_gradients(optimizer):
            optimizer.step()
        else:
            self._scaler.step(optimizer)
            self._used = True

    def update(self) -> None:
        """Adapt the scale after all optimizers have stepped, because it applies to all gradients."""
        if self._scaler is not None and self._used:
            self._scaler.update()
            self._used = False

    def module_errors(self, *, by_hand: bool) -> list[str]:
        """Return messages on steps that this precision cannot run. `by_hand`: manual optimization."""
        if not (self.scales and by_hand):
            return []
        return [
            "precision 16 with automatic_optimization = False: use precision bf16, or automatic optimization. A manual "
            "step would use scaled gradients."
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state; empty without one."""
        return {} if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take the scaler's state back."""
        if self._scaler is not None:
            self._scaler.load_state_dict(state_dict)


@contextmanager
def _in_doubles() -> Iterator[None]:
    """Make tensors of 64 bits where user code does not say otherwise."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _double_other(other: Any) -> Any:
    return other.double() if hasattr(other, "double") else other


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
