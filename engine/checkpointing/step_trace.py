"""Digests of the steps of a replay, by which two runs are compared in the order of cause."""

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from midstride.engine.state.tensor_digest import tensor_digest
from midstride.engine.trees import named_leaves

__all__ = ["StepTrace"]


class StepTrace:
    """The digests of one rank: for each step, and first for the state before the first one.

    Args:
        module: the module that is trained.
        optimizers: its optimizers.
        device: the device of this rank.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        self._module, self._optimizers, self._device = module, optimizers, device
        #: a dict for each step: "step", then kind -> name -> digest or value
        self.steps: list[dict[str, Any]] = []

    def note_batch(self, step: int, number: int, indices: object, batch: Any) -> None:
        """Note samples, batch and random states before batch `number`, which is of `step`."""
        if not self.steps:
            self.steps.append({"step": step - 1, **self._state()})
        found = self._of(step)
        found.setdefault("samples", {})[f"batch {number}"] = repr(indices)
        leaves = {path: _digest(value) for path, value in named_leaves(batch, "batch")}
        found.setdefault("batch", {}).update(leaves)
        found.setdefault("random state", {}).update(_random_states(self._device))

    def note_losses(self, step: int, losses: Mapping[str, object]) -> None:
        """Note the losses of a step by name."""
        self._of(step).setdefault("loss", {}).update({name: _digest(value) for name, value in losses.items()})

    def note_loss(self, step: int, loss: Tensor) -> None:
        """Note one more loss of a step."""
        self.note_losses(step, {f"loss {len(self._of(step).get('loss', ()))}": float(loss.detach())})

    def note_gradients(self, step: int) -> None:
        """Note the gradients of a step."""
        found = {name: p.grad for name, p in self._module.named_parameters() if p.grad is not None}
        self._of(step).setdefault("gradient", {}).update(_digests(found))

    def note_state(self, step: int) -> None:
        """Note weights, buffers and the state of the optimizers after a step."""
        self._of(step).update(self._state())

    def note_operations(self, step: int, calls: Sequence[tuple[str, str, str, str]]) -> None:
        """Note the operations of a step."""
        self._of(step)["operations"] = list(calls)

    def _of(self, step: int) -> dict[str, Any]:
        if not self.steps or self.steps[-1]["step"] != step:
            self.steps.append({"step": step})
        return self.steps[-1]

    def _state(self) -> dict[str, dict[str, str]]:
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._module.named_parameters()}
        return {
            "optimizer state": {
                name: digest for one in self._optimizers for name, digest in _of_optimizer(one, names).items()
            },
            "weight": _digests(dict(self._module.named_parameters())),
            "buffer": _digests(dict(self._module.named_buffers())),
        }


def _of_optimizer(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, str]:
    kind = type(optimizer).__name__
    options = {
        f"{kind}, group {number}: {key}": _digest(value)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params"
    }
    values = {
        f"{kind}: {key} of {names.get(parameter, 'a tensor')}": _digest(value)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }
    return options | values


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: _digest(value) for name, value in tensors.items()}


def _digest(value: Any) -> str:
    """Return a digest of a tensor, or of this rank's part of it; the text of any other value."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))
    if not isinstance(value, Tensor):
        return repr(value)[:200]
    local = getattr(value, "to_local", None)
    value = value if local is None else local()
    return repr(value.item()) if value.numel() == 1 else tensor_digest(value.detach())


def _random_states(device: torch.device) -> dict[str, str]:
    states = {
        "random": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
        "numpy": hashlib.sha256(repr(np.random.get_state(legacy=True)).encode()).hexdigest(),
        "torch": tensor_digest(torch.get_rng_state()),
    }
    return states | ({"cuda": tensor_digest(torch.cuda.get_rng_state(device))} if device.type == "cuda" else {})
