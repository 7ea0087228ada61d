"""For tests, ours and a user's: does this module resume exactly?

`assert_resumes_exactly(Classifier, Digits)` is a whole test.
"""

import copy
import multiprocessing
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from midstride.engine.errors import EngineError
from midstride.engine.faults import PHASES, Fault, FaultPlan
from midstride.engine.module import DataModule, TrainingModule
from midstride.engine.snapshots.codec import differences
from midstride.engine.snapshots.history import History
from midstride.engine.snapshots.reader import read
from midstride.engine.snapshots.store import Store
from midstride.engine.trainer import Trainer

__all__ = ["PHASES", "Fault", "FaultPlan", "assert_resumes_exactly", "final_state", "run_ranks"]


#: the first optimizer imports torch._dynamo, which takes seconds
PRELOAD = ("midstride.engine.testing", "torch._dynamo")


def run_ranks(
    target: Callable[..., None],
    *arguments: Any,
    processes: int = 1,
    environment: Mapping[str, str] = os.environ,
    timeout_s: float = 60.0,
    preload: Sequence[str] = PRELOAD,
) -> list[int]:
    """Call `target(*arguments)` in a world of fresh processes; return their exit codes (0, or -9 after SIGKILL).

    They are forked from one process that has torch (and, from its first start on, `preload`) imported already,
    so a world starts in a tenth of a second.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank in range(processes):
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
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


def final_state(run: str) -> list[Any]:
    """Return the state tree of every rank in the newest good snapshot of `run`."""
    store = Store.open(run)
    snapshot = History(store).newest_good()
    if snapshot is None:
        raise AssertionError(f"{run} holds no good snapshot")
    return [read(store, snapshot, rank) for rank in range(snapshot.manifest["world_size"])]


def assert_resumes_exactly(
    module: TrainingModule | Callable[[], TrainingModule],
    data: DataModule | Callable[[], DataModule],
    *,
    steps: int = 6,
    **options: Any,
) -> None:
    """Train `steps` steps undisturbed, then again from the snapshot after each of them; all must end alike.

    Args:
        module: the module, or what makes it.
        data: the data, or what makes them.
        steps: how far to train.
        options: for the Trainer, such as `accumulate_grad_batches=2`.

    Raises:
        AssertionError: naming what is not exact, by its path in the state, and from which step.
    """
    arguments = {"max_steps": steps, "enable_progress_bar": False, **options}

    def life(run: Path, resume: Any) -> None:
        trainer = Trainer(snapshots={"every_steps": 1, "keep": 10 * steps + 1000}, **arguments)
        trainer.fit(_fresh(module), _fresh(data), run=str(run), resume=resume)

    with tempfile.TemporaryDirectory() as folder:
        undisturbed = Path(folder, "undisturbed")
        life(undisturbed, "auto")
        expected = final_state(str(undisturbed))
        for step in range(1, steps):
            resumed = Path(folder, "resumed")
            shutil.copytree(undisturbed, resumed)
            life(resumed, step)
            found = final_state(str(resumed))
            if paths := [path for a, b in zip(expected, found, strict=True) for path in differences(a, b)]:
                shown = "\n  ".join(paths[:20])
                raise AssertionError(f"resumed from step {step}, these end otherwise than undisturbed:\n  {shown}")
            shutil.rmtree(resumed)


def _fresh(made: Any) -> Any:
    return made() if callable(made) and not isinstance(made, TrainingModule) else copy.deepcopy(made)
