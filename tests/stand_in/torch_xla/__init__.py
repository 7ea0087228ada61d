"""A stand-in for torch_xla: its device is the CPU, its collectives go over gloo, and it notes what was called.

It has what strategy xla calls, and nothing else. Like the real one it has a generator whose state every graph moves on.
"""

import torch

__version__ = "0.stand-in"

#: what was called, in order
calls: list[str] = []


def device(index: int | None = None) -> torch.device:
    return devices()[index or 0]


def devices() -> list[torch.device]:
    return [torch.device("cpu")]


def sync() -> None:
    from torch_xla.core import xla_model

    calls.append("sync")
    xla_model.set_rng_state((xla_model.get_rng_state() * 7012063 + 1012031) % (1 << 64))
