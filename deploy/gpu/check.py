"""What only a GPU shows, on a machine with Python, torch and what the wheelhouse brings: no Prefect, no compiler.

make test-gpu

Each check prints a line. Without a GPU (`--cpu`, to try this script) those of a GPU alone are left out, and said.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Callback, Trainer, TrainingModule
from midstride.engine.errors import UserError

STEPS, DEATH = 24, 9
SHARDED = ("sharded", "fully_sharded")


class Net(TrainingModule):
    """Draws random numbers on its device in every step."""

    def __init__(self, *extra: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Dropout(0.5), *extra, nn.Flatten(), nn.LazyLinear(10))
        self.net(torch.zeros(2, 1, 8, 8))
        self.mean = torch.zeros(())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Have on the device what was built on the host, and is no weight."""
        self.mean = self.mean.to(self.device) * 0.9 + batch[0].to(self.device).mean()
        self.log("mean", self.mean, on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        """Return the one there is."""
        return torch.optim.AdamW(self.parameters(), fused=False)


class Count(TrainingModule):
    """Compares batches with their numbers behind work that takes the device long."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width))
        self.register_buffer("wrong", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return a loss; count the numbers that are not those of the batch."""
        work = self.weight
        for _ in range(20):
            work = work @ self.weight
        self.wrong += (batch[0] != batch_idx).sum()
        return work.mean() + batch[0].mean()

    def configure_optimizers(self) -> Any:
        """Return one that changes nothing."""
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Die(Callback):
    """Ends the process as a kill does."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Die after the batch chosen."""
        if batch_idx == DEATH and trainer.world.rank == trainer.world.size - 1:
            os._exit(9)


class NoWait(Callback):
    """Has torch raise where the host waits for the GPU, from the second step on."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Switch it on."""
        torch.cuda.set_sync_debug_mode("error" if batch_idx else "default")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Let the host wait for what stands between two steps."""
        torch.cuda.set_sync_debug_mode("default")


def fit(run: str | None, *extra: nn.Module, callbacks: Any = (), **options: Any) -> None:
    """Fit a net for an epoch; a net, a trainer and data that are the same in every process."""
    trainer = Trainer(
        max_epochs=1, seed=7, enable_progress_bar=False, snapshots={"every_steps": 5}, callbacks=callbacks, **options
    )
    drawn = torch.Generator().manual_seed(1)
    samples = STEPS * 8
    data = TensorDataset(torch.randn(samples, 1, 8, 8, generator=drawn), torch.arange(samples) % 10)
    trainer.fit(Net(*extra), DataLoader(data, batch_size=8, shuffle=True), run=run)


def life(run: Path, *, dies: bool, ranks: int = 0, visible: str | None = None, **options: Any) -> int:
    """Return the exit code of what fits `run`: one process, or as many ranks under torchrun; its words go to a file.

    Args:
        run: the folder of the run.
        dies: whether its last rank dies on the way.
        ranks: of torchrun; 0 for a process without it.
        visible: the GPUs that it sees, as `CUDA_VISIBLE_DEVICES` has them; None for all.
        options: of the Trainer.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    wanted = json.dumps({"run": str(run), "dies": dies, **options})
    environment = os.environ | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    with run.with_suffix(".log").open("a") as log:
        command = [sys.executable, *torchrun, __file__, "--fit", wanted]
        return subprocess.run(command, check=False, env=environment, stdout=log, stderr=log).returncode


def files(run: Path) -> list[bytes]:
    """The metric log and the last weights of `run`."""
    return [(run / "metrics.csv").read_bytes(), *(p.read_bytes() for p in sorted(run.glob("last/*.safetensors")))]


def resumes(folder: Path, first: dict[str, Any], second: dict[str, Any] | None = None) -> None:
    """Compare a run that was killed with options `first` and resumed with `second` with one that was not."""
    whole, killed = folder / "whole", folder / "killed"
    assert life(whole, dies=False, **first) == 0
    assert life(killed, dies=True, **first) != 0
    assert not list(killed.glob("last/*")), "the run was not killed"
    assert life(killed, dies=False, **(second or first)) == 0
    assert files(whole) == files(killed), "other bits"
    assert len(files(whole)) == 2


def refuses_the_cpu(folder: Path) -> None:
    """Resume on the host a run whose dropout was drawn on a GPU."""
    run = folder / "run"
    assert life(run, dies=True, gpus=[0]) != 0
    assert life(run, dies=False, accelerator="cpu") != 0, "it went on with other random numbers"
    assert "the snapshot has the random numbers of 1 GPU" in run.with_suffix(".log").read_text()


def hears_of_a_lost_rank(folder: Path, *, cpu: bool) -> None:
    """Have one of a script's two ranks end without a word; the other may not wait for it."""
    began_s = time.monotonic()
    assert life(folder / "run", dies=True, devices=2, **({"accelerator": "cpu"} if cpu else {})) != 0
    assert time.monotonic() - began_s < 120, "the rank that was left waited on"


def names_the_operation(folder: Path) -> None:
    """Fit a layer that is not repeatable."""
    said = ""
    try:
        fit(str(folder / "run"), nn.AdaptiveAvgPool2d(2))
    except UserError as error:
        said = str(error)
    assert "adaptive_avg_pool2d" in said, said
    assert "nn.AvgPool2d" in said, said


def copies_whole_batches(folder: Path, *, pinned: bool = False, width: int = 2048) -> None:
    """Train on batches of 4 MB that are copied while steps before them are computed."""
    module = Count(width)
    numbers = torch.arange(100.0).repeat_interleave(8)
    data = TensorDataset(numbers[:, None].repeat(1, 1 << 17))
    Trainer(max_epochs=1, enable_progress_bar=False).fit(module, DataLoader(data, batch_size=8, pin_memory=pinned))
    wrong = int(module.wrong)
    assert wrong == 0, f"{wrong} numbers were read before their batch was there, or after it was gone"


def checks(*, cpu: bool) -> dict[str, Callable[[Path], None] | None]:
    """Return every check by its name; None where there is too little to try it on."""
    gpus = 0 if cpu else torch.cuda.device_count()
    one: dict[str, Any] = {"gpus": [0]} if gpus else {"accelerator": "cpu"}
    many = {"accelerator": "cpu"} if cpu else {}
    size = 2 if cpu else min(gpus, 2)
    runs = {f"precision {precision}": {"precision": precision, **one} for precision in ("32", "bf16", "16")}
    runs |= {f"{name}, ranks: {size}": {"strategy": name, "ranks": size, **many} for name in ("ddp", "ddp2", *SHARDED)}
    runs |= {f"{name} on one": {"strategy": name, **one} for name in ("dp", "ddp_spawn", "ddp_fork")}
    runs["fully_sharded, bf16 gathered"] = {
        **runs[f"fully_sharded, ranks: {size}"],
        "precision": "bf16",
        "strategy_args": {"param_dtype": "bf16"},
    }
    found: dict[str, Callable[[Path], None] | None] = {
        f"killed and resumed, {name}": partial(resumes, first=options) for name, options in runs.items()
    }
    offload = {**runs[f"fully_sharded, ranks: {size}"], "strategy_args": {"cpu_offload": True}}
    found["killed and resumed, offload to the host"] = partial(resumes, first=offload) if gpus else None
    two_devices = {"strategy": "dp", "gpus": 2}
    found["killed and resumed, dp on 2"] = partial(resumes, first=two_devices) if gpus > 1 else None
    fewer: dict[str, Any] = {"first": one, "second": {"visible": "0", **one}}
    found["resumed where fewer GPUs are seen"] = partial(resumes, **fewer) if gpus > 1 else None
    found["resumed on the CPU is refused"] = refuses_the_cpu if gpus else None
    found["resumed on another GPU"] = partial(resumes, first=one, second={"gpus": [1]}) if gpus > 1 else None
    found["a rank is lost"] = partial(hears_of_a_lost_rank, cpu=cpu) if cpu or gpus > 1 else None
    found["an operation that is not repeatable"] = names_the_operation if gpus else None
    found["whole batches"] = copies_whole_batches if gpus else partial(copies_whole_batches, width=16)
    found["whole batches, pinned"] = partial(copies_whole_batches, pinned=True) if gpus else None
    found["no wait in a step"] = (lambda folder: fit(None, callbacks=[NoWait()])) if gpus else None
    return found


def main() -> None:
    """Run every check; end with 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--fit", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.fit:
        return fit(callbacks=[Die()] if arguments.fit.pop("dies") else [], **arguments.fit)
    cpu = arguments.cpu
    if not cpu and not torch.cuda.is_available():
        sys.exit("there is no GPU here (torch.cuda.is_available() is False): say --cpu to try the script itself")
    print(f"torch {torch.__version__} on {'the CPU' if cpu else torch.cuda.get_device_name()}", flush=True)
    failed = 0
    for name, check in checks(cpu=cpu).items():
        if check is None:
            print(f"left out  {name}: too few GPUs", flush=True)
            continue
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                check(Path(folder))
                said = "good    "
            except Exception as error:
                logs = "".join(log.read_text() for log in Path(folder).glob("*.log"))
                failed, said = failed + 1, f"{logs}FAILED   {type(error).__name__}: {error}:"
        print(f"{said}  {name} ({time.monotonic() - began_s:.1f} s)", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
