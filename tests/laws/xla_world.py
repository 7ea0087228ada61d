"""A world of forked ranks that have torch_xla: the real one where it is installed, elsewhere the stand-in."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from midstride.engine.testing import run_ranks

#: the folder to import the stand-in from; None where the real one is there, as in the environment of `make test-xla`
STAND_IN = Path(__file__).parents[1] / "stand_in" if importlib.util.find_spec("torch_xla") is None else None
#: processes to try a world of; on the CPU, torch_xla knows of one
XLA_RANKS = (3, 1) if STAND_IN else (1,)
#: the real one compiles, for seconds each time a batch has another shape
_TIMEOUT_S = 900.0


def run_xla_ranks(target: Callable[..., None], *arguments: Any, **options: Any) -> list[int]:
    """Call `target(*arguments)` in forked ranks that can import torch_xla; the rest as `run_ranks`."""
    return run_ranks(_join, target, arguments, timeout_s=_TIMEOUT_S, **options)


def _join(target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    if STAND_IN is not None:
        sys.path.insert(0, str(STAND_IN))
    target(*arguments)
