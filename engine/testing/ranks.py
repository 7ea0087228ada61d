"""`run_ranks`: calls a function in each rank of a world of new processes."""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from midstride.engine.errors import EngineError
from midstride.engine.processes.child_processes import ChildProcesses
from midstride.engine.processes.loopback import rank_environments
from midstride.engine.session.private_file import AnonymousFile

__all__ = ["run_ranks"]

#: what ranks would import one by one; the first optimizer imports torch._dynamo, which takes seconds
PRELOAD = (
    "midstride.engine.testing",
    "midstride.engine.strategies.ddp",
    "midstride.engine.storage.local",
    "torch._dynamo",
)


def run_ranks(
    target: Callable[..., None],
    *arguments: Any,
    processes: int = 1,
    environment: Mapping[str, str] = os.environ,
    timeout_s: float = 600.0,
    preload: Sequence[str] = PRELOAD,
) -> list[int]:
    """Call `target(*arguments)` in `processes` new ranks. Return exit codes, -9 after SIGKILL.

    The ranks are forked from a server process that has imported torch and the modules in `preload` once, so a world
    starts in about 0.1 s.

    Raises:
        TimeoutError: a rank did not end within `timeout_s` seconds.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["midstride.engine.testing.disable_gc", *preload, "midstride.engine.testing.freeze_gc"]
    )
    meeting = AnonymousFile()
    environments = rank_environments(processes, meeting.path, base=environment)
    deadline = time.monotonic() + timeout_s
    with ChildProcesses(_rank, [target, arguments], environments, "forkserver") as ranks:
        while hung := ranks.running():
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks {hung} of {processes} did not end within {timeout_s} s")
            ranks.wait(deadline - time.monotonic())
        return [code or 0 for code in ranks.exit_codes()]


def _rank(target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    rank = os.environ["RANK"]  # the target may leave this world, for one that it joins or starts
    torch.set_num_threads(1)
    # What the rank starts (workers of loaders) starts as it would in a rank of any other launcher.
    multiprocessing.set_start_method("fork", force=True)
    try:
        target(*arguments)
    except EngineError as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
        sys.exit(error.exit_code)
