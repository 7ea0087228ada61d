"""Repeatable algorithms, for as long as a fit runs."""

import os
from types import TracebackType

import torch

__all__ = ["Determinism"]


class Determinism:
    """Switches torch to algorithms that give the same bits each time, and back.

    Args:
        chosen: what the user asked for; None leaves it to `on`.
        on: whether it is needed: snapshots promise the same bits.
    """

    def __init__(self, chosen: bool | None, *, on: bool) -> None:
        self._on = on if chosen is None else chosen

    def __enter__(self) -> None:
        self._before = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
        if self._on:
            if torch.cuda.is_available():
                # cuBLAS reads this when it is first used; without it torch refuses to promise anything.
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            # use_deterministic_algorithms(True) does the same, but imports the compiler first: 2.5 s.
            torch.set_deterministic_debug_mode("error")
            torch.backends.cudnn.benchmark = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        mode, torch.backends.cudnn.benchmark = self._before
        torch.set_deterministic_debug_mode(mode)
