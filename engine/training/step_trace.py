"""A trace of steps: digests of everything that decides a step, in the order of cause."""

import hashlib
import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from midstride.engine.state.tensor_digest import tensor_digest
from midstride.engine.training.context import FitContext
from midstride.engine.trees import named_leaves

__all__ = ["StepTrace"]


class StepTrace:
    """The digests of one rank: for each step, and first for the state before the first one."""

    def __init__(self) -> None:
        #: a dict for each step: "step", then kind -> name -> digest or value
        self.steps: list[dict[str, Any]] = []

    def note(self, phase: str, context: FitContext, step: int, *given: object) -> None:
        """Note the digests of a phase of the step after `step` others, or of its end."""
        if phase == "forward":
            self._before_batch(context)
        elif phase == "backward" and given and isinstance(given[0], Tensor):
            losses = self._of(step + 1).setdefault("loss", {})
            losses[f"loss {len(losses)}"] = repr(float(given[0].detach()))
        elif phase == "optimizer_step":
            found = {name: p.grad for name, p in context.module.named_parameters() if p.grad is not None}
            self._of(step + 1).setdefault("gradient", {}).update(_digests(found))
        elif phase == "after_step":
            self._of(step).update(_state(context.module, context.optimizers))

    def _before_batch(self, context: FitContext) -> None:
        """Note samples, batch and random states of a batch."""
        progress, loader = context.progress, context.loaders.training
        if not self.steps:
            self.steps.append({"step": progress.step, **_state(context.module, context.optimizers)})
        step = self._of(progress.step + 1)
        step.setdefault("samples", {})[f"batch {progress.batch}"] = repr(loader.last_indices)
        leaves = {path: _digest(value) for path, value in named_leaves(context.metric_logger.batch, "batch")}
        step.setdefault("batch", {}).update(leaves)
        step.setdefault("random state", {}).update(_random_states(context.device))

    def _of(self, step: int) -> dict[str, Any]:
        if not self.steps or self.steps[-1]["step"] != step:
            self.steps.append({"step": step})
        return self.steps[-1]


def _state(module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, dict[str, str]]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    return {
        "optimizer state": {name: digest for one in optimizers for name, digest in _of_optimizer(one, names).items()},
        "weight": _digests(dict(module.named_parameters())),
        "buffer": _digests(dict(module.named_buffers())),
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
