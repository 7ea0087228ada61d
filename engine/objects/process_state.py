"""What user code sets for the whole process: settings of torch, variables of the environment."""

import linecache
import os
from collections.abc import Callable, Iterable, Iterator

import torch
import xxhash

from midstride.engine.objects.user_modules import user_modules

__all__ = ["process_state"]

#: what decides bits, and stays as it is set
_SETTINGS: tuple[Callable[[], object], ...] = (
    torch.get_default_dtype,
    torch.get_default_device,
    torch.get_float32_matmul_precision,
    torch.are_deterministic_algorithms_enabled,
)


def process_state(classes: Iterable[type]) -> Iterator[tuple[str, object]]:
    """Yield what is set, by name; of the environment, a digest of what the user's code around `classes` names."""
    for setting in _SETTINGS:
        yield f"torch.{setting.__name__}()", str(setting())
    sources = ["".join(linecache.getlines(getattr(module, "__file__", None) or "")) for module in user_modules(classes)]
    for name, value in os.environ.items():
        if any(name in source for source in sources):  # libraries set others, which no training step reads
            yield f"environment variable {name}", xxhash.xxh3_64_hexdigest(value.encode(errors="surrogateescape"))[:6]
