"""Devices: which ones there are, and which one a rank trains on."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from midstride.engine.world import World

__all__ = ["convert", "device_of", "move"]


def device_of(world: World) -> torch.device:
    """Return the device of this rank: its own GPU where there are any, else the CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def move(batch: Any, device: torch.device) -> Any:
    """Return `batch` on `device`; on the CPU there is nothing to move."""
    if device.type == "cpu":
        return batch
    return convert(batch, lambda tensor: tensor.to(device, non_blocking=True), lambda other: other.to(device))


def convert(
    batch: Any, change: Callable[[Tensor], Tensor], change_other: Callable[[Any], Any] = lambda other: other
) -> Any:
    """Return `batch` with every tensor in it changed: in dicts, lists, tuples and dataclasses.

    Args:
        batch: any nest of them; what is none of them stays.
        change: of a tensor.
        change_other: of anything else that has `.to`.
    """
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return type(batch)({key: convert(value, change, change_other) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(convert(value, change, change_other) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(convert(value, change, change_other) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {f.name: convert(getattr(batch, f.name), change, change_other) for f in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **fields)
    return change_other(batch) if hasattr(batch, "to") else batch
