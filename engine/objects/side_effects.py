"""A step of a module that leaves nothing behind."""

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
    """Put back what a step of `module` within changes: its buffers and objects, and the generators.

    Args:
        module: which is called.
        generators: of the devices that the step draws on.
        objects: that may be changed, the module's among them; those of the module alone if None.
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
