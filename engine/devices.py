"""Devices: which ones there are, and which one a rank trains on."""

from typing import Any

import torch

from midstride.engine.world import World

__all__ = ["device_of", "move"]


def device_of(world: World) -> torch.device:
    """Return the device of this rank: its own GPU where there are any, else the CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def move(batch: Any, device: torch.device) -> Any:
    """Return `batch` on `device`: tensors in dicts, lists, tuples, dataclasses, and whatever has `.to`."""
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True) if isinstance(batch, torch.Tensor) else batch.to(device)
    if isinstance(batch, dict):
        return type(batch)({key: move(value, device) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(move(value, device) for value in batch)
    if hasattr(batch, "__dataclass_fields__"):
        for name in batch.__dataclass_fields__:
            setattr(batch, name, move(getattr(batch, name), device))
    return batch
