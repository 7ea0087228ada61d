"""The strategies under the laws, one row each: a new strategy is one more row."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from laws.lives import SampleData, Setting, live
from laws.modules import MODULES
from laws.xla_world import STAND_IN, XLA_RANKS
from support.fork_server import outside, run_program
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from midstride.engine.fault_injection import FaultPlan
from midstride.engine.strategies.ddp import Ddp
from midstride.engine.strategies.step import TrainingStep
from midstride.engine.testing import run_ranks

TESTS = Path(__file__).parents[1]
#: how a world is started: gives the run of a setting one life, as `live` does; killed ranks are seen in its exit code
Start = Callable[[Setting, Path, FaultPlan | None], list[int]]


def environment(folder: Path, plan: FaultPlan | None) -> dict[str, str]:
    """Return the environment of a process that no launcher started."""
    return {**outside(), "LAWS_JOURNAL": str(folder / "journal.jsonl"), **(plan.environment if plan else {})}


def in_caller(setting: Setting, folder: Path, plan: FaultPlan | None = None) -> list[int]:
    """Start the ranks from within a process that calls `fit`."""
    return run_ranks(_call, setting, str(folder / "run"), environment=environment(folder, plan))


def _call(setting: Setting, run: str) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)
    setting.train(run)


def as_script(setting: Setting, folder: Path, plan: FaultPlan | None = None) -> list[int]:
    """Start a script, which starts itself again for each other rank."""
    script, run = folder / "script.py", str(folder / "run")
    script.write_text(
        f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from laws.lives import Setting
if __name__ == "__main__":
    Setting({setting.ranks}, {setting.layout!r}, {setting.workers}, {setting.options!r}).train({run!r})
"""
    )
    return [run_program(script, folder / "log.txt", environment=environment(folder, plan))]


def _data_of(readers: int, ranks: int, *arguments: Any) -> SampleData:
    return SampleData(readers, *arguments)


@dataclass(frozen=True)
class Row:
    """One strategy as the laws try it.

    Args:
        ranks: numbers of processes; sums over two have no order, so what sums over ranks is tried with three.
        options: for the Trainer.
        modules: what is trained, by name in `MODULES`; "" is the plain one. The first is with the first of `ranks`, the
            others are with the last: what is theirs needs no order of sums.
        start: how the world is started.
        like: options of the run it must equal; its own if None.
        readers: processes that have samples of their own, if not all of them.
        workers: of the training loader.
    """

    ranks: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    modules: tuple[str, ...] = ("",)
    start: Start = live
    like: dict[str, Any] | None = None
    readers: int | None = None
    workers: int = 0

    def settings(self, ranks: int, module: str = "") -> tuple[Setting, Setting]:
        """Return the run that lives and dies, and the one it must equal."""
        kind: dict[str, Any] = {"module": MODULES[module][0]} if module else {}
        if self.readers is not None:
            kind["data"] = partial(_data_of, self.readers)
        like = self.options if self.like is None else self.like
        lives, expected = (
            # One validation an epoch: half of the snapshots would else stand in validations.
            Setting(ranks=ranks, options={"val_check_interval": 1.0, **options}, **kind)
            for options in (self.options, like)
        )
        return replace(lives, workers=self.workers), expected


class Small(Ddp):
    """A strategy of a user's own: it meets in its own way, and wraps in its own way."""

    def init_process_group(self) -> None:
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"
        super().init_process_group()

    def wrap(self, step: TrainingStep, *, one_backward: bool) -> nn.Module:
        wrapped = super().wrap(step, one_backward=one_backward)
        assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return wrapped


_ROW = ("layers in a row",)
_SPLIT_MODULES = ("", "torchmetrics", "two optimizers", "training_step_end")

ROWS: dict[str, Row] = {
    "dp on 2": Row((1,), {"strategy": "dp", "devices": 2}, _SPLIT_MODULES),
    "dp on 4": Row((1,), {"strategy": "dp", "devices": 4}),
    "ddp2": Row((3, 2), {"strategy": "ddp2", "devices": 2}, _SPLIT_MODULES),
    "ddp2 on 4": Row((2,), {"strategy": "ddp2", "devices": 4, "precision": "bf16"}),
    "ddp, unused": Row((3,), {"strategy": "ddp", "strategy_args": {"find_unused_parameters": True}}),
    "ddp, static": Row((3,), {"strategy": "ddp", "strategy_args": {"static_graph": True}}),
    "ddp, fp16 gradients": Row((3,), {"strategy": "ddp", "strategy_args": {"comm_hook": "fp16_compress"}}),
    "ddp, 16 bits": Row((2,), {"strategy": "ddp", "precision": "16"}),
    "horovod": Row((3, 2), {"strategy": "horovod"}, ("", "torchmetrics", "two optimizers", "manual")),
    "horovod, 16 bits": Row((3,), {"strategy": "horovod", "precision": "16", "gradient_clip_val": 0.5}),
    "sharded": Row(
        (3, 2),
        {"strategy": "sharded"},
        ("", "torchmetrics", "blocks", "training_step_end", "more to train later", "averages in a late buffer"),
    ),
    "fully_sharded": Row((3, 2), {"strategy": "fully_sharded"}, ("", "blocks")),
    "sharded, 16 bits": Row((3,), {"strategy": "sharded", "precision": "16", "gradient_clip_val": 0.5}),
    "fully_sharded, windows": Row(
        (3,), {"strategy": "fully_sharded", "precision": "bf16", "accumulate_grad_batches": 4, "max_epochs": 6}
    ),
    "pipeline": Row((2,), {"strategy": "pipeline"}, _ROW, readers=1),
    "pipeline, checkpoints": Row(
        (3,),
        {"strategy": "pipeline", "strategy_args": {"schedule": "gpipe", "checkpoint": True}, "gradient_clip_val": 0.5},
        _ROW,
        readers=1,
    ),
    "pipeline, two of them": Row(
        (4,),
        {
            "strategy": "pipeline",
            "strategy_args": {"balance": [6, 3]},
            "precision": "bf16",
            "accumulate_grad_batches": 2,
            "max_epochs": 4,
        },
        _ROW,
        readers=2,
    ),
    "a class of one's own": Row((2,), {"strategy": "laws.strategies:Small"}),
    # Started in other ways, these are ddp, bit for bit.
    "ddp_fork": Row((3,), {"strategy": "ddp_fork", "devices": 3}, start=in_caller, like={}),
    "ddp_spawn": Row((2,), {"strategy": "ddp_spawn", "devices": 2}, start=as_script, like={}, workers=1),
    "ddp_notebook": Row((2,), {"strategy": "ddp_notebook", "devices": 2}, start=in_caller, like={}),
    "ddp, a script": Row((2,), {"devices": 2}, start=as_script, like={}),
    "single, 16 bits": Row((1,), {"precision": 16, "gradient_clip_val": 0.5}),
    "xla": Row((3, 2) if STAND_IN else XLA_RANKS, {"strategy": "xla"}, ("", "torchmetrics", "two optimizers")),
    "xla, bf16": Row(
        XLA_RANKS[-1:], {"strategy": "xla", "precision": "bf16", "accumulate_grad_batches": 2, "max_epochs": 4}
    ),
    "ddp, small buckets": Row(
        (3,), {"strategy": "ddp", "strategy_args": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1}}
    ),
    "fully_sharded, replicas": Row((4,), {"strategy": "fully_sharded", "strategy_args": {"replicas": 2}}, ("blocks",)),
    "ddp, compiled": Row((3,), {"strategy": "ddp", "compile": {"backend": "aot_eager"}}),
    "fully_sharded, compiled": Row(
        (3,), {"strategy": "fully_sharded", "compile": {"backend": "aot_eager"}}, ("blocks",)
    ),
    "fully_sharded, bf16 gathered": Row(
        (3,), {"strategy": "fully_sharded", "strategy_args": {"param_dtype": "bf16"}, "precision": "bf16"}, ("blocks",)
    ),
}
