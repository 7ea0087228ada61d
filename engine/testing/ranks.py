"""Functions called in a world of fresh processes."""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from midstride.engine.errors import EngineError
from midstride.engine.processes.loopback import ADDRESS, interfaces
from midstride.engine.strategies.rendezvous import serve_store

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
    timeout_s: float = 100.0,
    preload: Sequence[str] = PRELOAD,
) -> list[int]:
    """Call `target(*arguments)` in a world of fresh processes; return their exit codes (0, or -9 after SIGKILL).

    They are forked from one process that has torch (and, from its first start on, `preload`) imported already,
    so a world starts in a tenth of a second.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*preload, "midstride.engine.testing.freeze_gc"])
    store = serve_store()
    ranks = []
    for rank in range(processes):
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": ADDRESS,
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **interfaces(environment),
        }
        ranks.append(context.Process(target=_rank, args=({**environment, **place}, target, arguments)))
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(timeout_s)
        if hung := [rank for rank, process in enumerate(ranks) if process.is_alive()]:
            raise TimeoutError(f"ranks {hung} of {processes} did not end within {timeout_s} s")
        return [process.exitcode or 0 for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.join()
            process.close()


def _rank(environment: dict[str, str], target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    # What the rank starts (workers of loaders) starts as it would in a rank of any other launcher.
    multiprocessing.set_start_method("fork", force=True)
    try:
        target(*arguments)
    except EngineError as error:
        print(f"rank {environment['RANK']}: {type(error).__name__}: {error}", flush=True)
        os._exit(error.exit_code)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
