"""Runs a step of a module and reverts everything it changed."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from midstride.engine.objects.object_state import Objects
from midstride.engine.seeds import Generators
from midstride.engine.state.stateful import Stateful, state_of

__all__ = ["side_effects_reverted"]


@contextmanager
def side_effects_reverted(module: nn.Module, generators: Generators, objects: Objects | None = None) -> Iterator[None]:
    """Revert what steps of `module` in the block change: buffers, objects and random number generators.

    Args:
        module: the module that is called.
        generators: generators of the devices on which the step draws.
        objects: objects that may change, those of the module included; None for those of the module only.
    """
    parts: dict[str, Stateful] = {"objects": objects or Objects.of_module(module), "generators": generators}
    before = copy.deepcopy(state_of(parts))
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        yield
    finally:
        for name, part in parts.items():
            part.load_state_dict(before[name])
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])
