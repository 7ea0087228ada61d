"""Checks that need a GPU, on a machine with Python, torch and the wheelhouse; without Prefect or a compiler.

make test-gpu

Each check prints a line. With `--cpu`, to try this script without a GPU, checks that need a GPU are listed as left out.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from operations import ALLOWED, REFUSED, Operation, numbers
from programs import Count, NoWait, files, fit, life
from torch.utils.data import DataLoader, TensorDataset

from midstride.engine import Trainer
from midstride.engine.checkpointing.determinism import REPEATABLE, Determinism
from midstride.engine.errors import UserError

SHARDED = ("sharded", "fully_sharded")
#: pixels of an image's side: many threads add to one number
SIDE = 128

Check = Callable[[Path], None]


def resumes(folder: Path, first: dict[str, Any], second: dict[str, Any] | None = None) -> None:
    """Check that a run killed with options `first` and resumed with `second` ends with the bits of one not killed."""
    whole, killed = folder / "whole", folder / "killed"
    assert life(whole, **first) == 0
    assert life(killed, end="dies", **first) != 0
    assert not list(killed.glob("last/*")), "the run was not killed"
    assert life(killed, **(second or first)) == 0
    assert files(whole) == files(killed), "other bits"
    assert len(files(whole)) == 2


def refused(folder: Path, said: str, first: dict[str, Any] | None = None, **options: Any) -> None:
    """Check that a fit with `options` fails, and its log matches the regular expression `said`.

    Args:
        folder: for the run and its log.
        said: a regular expression.
        first: options of an attempt that is killed before; None for no such attempt.
        options: of the fit.
    """
    run = folder / "run"
    if first is not None:
        assert life(run, end="dies", **first) != 0
    began_s = time.monotonic()
    assert life(run, **options) != 0, "it was not refused"
    assert re.search(said, run.with_suffix(".log").read_text()), "it was refused for another reason"
    assert time.monotonic() - began_s < 120, "a process waited on"


def notices_a_lost_rank(folder: Path, *, cpu: bool) -> None:
    """Check that if one of a script's two ranks is killed, the other ends, too."""
    began_s = time.monotonic()
    assert life(folder / "run", end="dies", devices=2, **({"accelerator": "cpu"} if cpu else {})) != 0
    assert time.monotonic() - began_s < 120, "the rank that was left waited on"


def names_the_operations(_: Path) -> None:
    """Check that operations listed as not repeatable in docs/gpu.md are refused, and that their replacements work."""
    repeatable, faults = [], dict[str, Exception]()
    for name, (operation, instead) in REFUSED.items():
        error = _error_of(operation, operation)
        if error is None:
            repeatable.append(name)
        elif not isinstance(error, UserError) or REPEATABLE[name][1] not in str(error):
            faults[name] = error
        faults |= {f"instead of {name}": error for one in instead if (error := _error_of(one, operation))}
    print(f"          repeatable in this version of torch: {', '.join(repeatable) or 'none'}")
    assert not faults, faults


def allows_operations(_: Path) -> None:
    """Check every operation that docs/gpu.md lists as repeatable."""
    faults = {name: error for name, one in ALLOWED.items() if (error := _error_of(one, one))}
    assert not faults, faults


def _error_of(operation: Operation, like: Operation) -> Exception | None:
    try:
        _check_repeatable(operation, like)
    except Exception as error:
        return error
    return None


def _check_repeatable(operation: Operation, like: Operation) -> None:
    """Check that results of `operation` have the same bits each time, and are close to those of `like` on the host."""
    with Determinism(None, on=True):
        results = [numbers(operation, torch.device("cuda"), SIDE) for _ in range(5)]
    for again in results[1:]:
        assert all(map(torch.equal, results[0], again)), "other bits each time, and it was not refused"
    precision = 0.05 if results[0][0].dtype is torch.bfloat16 else 1e-2
    for one, other in zip(results[0], numbers(like, side=SIDE), strict=True):
        torch.testing.assert_close(one, other, rtol=precision, atol=precision)


def copies_whole_batches(_: Path, *, pinned: bool = False, width: int = 2048) -> None:
    """Check batches of 4 MB that are copied to the device while earlier steps run."""
    module = Count(width)
    samples = torch.arange(100.0).repeat_interleave(8)
    data = TensorDataset(samples[:, None].repeat(1, 1 << 17))
    Trainer(max_epochs=1, enable_progress_bar=False).fit(module, DataLoader(data, batch_size=8, pin_memory=pinned))
    wrong = int(module.wrong)
    assert wrong == 0, f"{wrong} numbers were read before their batch was there, or after it was gone"


def never_waits(_: Path, **options: Any) -> None:
    """Train while torch raises if the host waits for the GPU."""
    fit(None, callbacks=[NoWait()], **options)


def _of_strategies(gpus: int, *, cpu: bool) -> dict[str, dict[str, Any]]:
    one: dict[str, Any] = {"accelerator": "cpu"} if cpu else {"gpus": [0]}
    size, many = (2, {"accelerator": "cpu"}) if cpu else (min(gpus, 2), {})
    of_ranks = {name: {"strategy": name, "ranks": size, **many} for name in ("ddp", "ddp2", *SHARDED)}
    gathered = {"precision": "bf16", "strategy_args": {"param_dtype": "bf16"}}
    return {
        **{f"precision {precision}": {"precision": precision, **one} for precision in ("32", "bf16", "16")},
        **{f"{name}, ranks: {size}": options for name, options in of_ranks.items()},
        **{f"{name} on one": {"strategy": name, **one} for name in ("dp", "ddp_spawn", "ddp_fork")},
        "fully_sharded, bf16 gathered": {**of_ranks["fully_sharded"], **gathered},
        "workers": {**one, "loader": {"num_workers": 2, "pin_memory": not cpu}},
        **{net: {**one, "net": net} for net in ("normalised", "attention", "recurrent", "wide")},
        "windows, clipped": {**one, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
        "bad batches left out": {**one, "on_nan": "skip"},
        "lanes": {**one, "lanes": 2, "has_extras": False},
        "attention in bf16": {**one, "net": "attention", "precision": "bf16"},
    }


def _ddp(**options: Any) -> dict[str, Any]:
    return {"strategy": "ddp", "strategy_args": options}


def _of_gpus(gpus: int) -> dict[str, Check | None]:
    """Return the checks that need a GPU; None for those that need two if there is one."""
    one: dict[str, Any] = {"gpus": [0]}
    runs: dict[str, dict[str, Any]] = {
        **{name: {**one, "optimizer": {name: True}} for name in ("fused", "capturable", "foreach")},
        "fused, precision 16": {**one, "optimizer": {"fused": True}, "precision": "16"},
        "compiled": {**one, "net": "compiled"},
        "compiled to graphs": {**one, "net": "compiled to graphs"},
        "batch norm over ranks": {"ranks": 1, "net": "normalised", **_ddp(sync_batchnorm=True)},
        "gradients in bf16": {"ranks": 1, **_ddp(comm_hook="bf16_compress")},
        "gradients as views": {"ranks": 1, **_ddp(gradient_as_bucket_view=True, bucket_cap_mb=1)},
        "recurrent with dropout, without cuDNN": {**one, "net": "recurrent with dropout", "cudnn": False},
        "offload to the host": {"strategy": "fully_sharded", "ranks": 1, "strategy_args": {"cpu_offload": True}},
    }
    pairs: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "dp on 2": ({"strategy": "dp", "gpus": 2},) * 2,
        "where fewer GPUs are seen": (one, {"visible": "0", **one}),
        "on another GPU": (one, {"gpus": [1]}),
    }
    cpu = {"accelerator": "cpu"}
    return {
        **{f"killed and resumed, {name}": partial(resumes, first=options) for name, options in runs.items()},
        **{f"resumed, {n}": partial(resumes, first=a, second=b) if gpus > 1 else None for n, (a, b) in pairs.items()},
        "resumed on the CPU": partial(refused, said="a generator of a GPU", first=one, **cpu),
        "more processes than GPUs": partial(refused, said=r"GPUs? 0.* here", devices=gpus + 1),
        "more ranks than GPUs": partial(refused, said=r"GPUs? 0.* here", ranks=gpus + 1, strategy="ddp"),
        "a layer that is not repeatable": partial(refused, said=r"adaptive_avg_pool2d.*nn\.AvgPool2d", net="adaptive"),
        "dropout of cuDNN": partial(refused, said="drawn by cuDNN.*nn.Dropout between", net="recurrent with dropout"),
        "a fork after CUDA was used": partial(
            refused, said="after CUDA was used", touches_cuda=True, strategy="ddp_fork"
        ),
        "too little memory": partial(refused, said="out of memory", end="fills memory"),
        "a row that is not there": partial(refused, said="device-side assert", end="reads beyond"),
        "a rank is lost": partial(notices_a_lost_rank, cpu=False) if gpus > 1 else None,
        "whole batches": copies_whole_batches,
        "whole batches, pinned": partial(copies_whole_batches, pinned=True),
        **{f"no wait, {net}": partial(never_waits, net=net) for net in ("convolution", "normalised", "attention")},
        "no wait, fused": partial(never_waits, optimizer={"fused": True}),
        "operations that are not repeatable": names_the_operations,
        "operations that are repeatable": allows_operations,
    }


def checks(*, cpu: bool) -> dict[str, Check | None]:
    """Return every check by its name; None if there are too few GPUs for it."""
    gpus = 0 if cpu else torch.cuda.device_count()
    both = _of_strategies(gpus, cpu=cpu)
    found: dict[str, Check | None] = {
        f"killed and resumed, {name}": partial(resumes, first=options) for name, options in both.items()
    }
    if cpu:
        found["a rank is lost"] = partial(notices_a_lost_rank, cpu=True)
        found["whole batches"] = partial(copies_whole_batches, width=16)
    return (dict.fromkeys(_of_gpus(1)) if cpu else _of_gpus(gpus)) | found


def _run_check(name: str, check: Check | None) -> bool:
    """Run `check` and print its result; return whether it failed."""
    if check is None:
        print(f"left out  {name}: too few GPUs", flush=True)
        return False
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            check(Path(folder))
            failed, said = False, "good    "
        except Exception as error:
            logs = "".join(log.read_text() for log in Path(folder).glob("*.log"))
            failed, said = True, f"{logs}FAILED   {type(error).__name__}: {error}:"
    print(f"{said}  {name} ({time.monotonic() - began_s:.1f} s)", flush=True)
    return failed


def _run_in_process(name: str) -> bool:
    """Run a check in a new process and print its output; return whether it failed."""
    command = [sys.executable, __file__, "--check", name, *sys.argv[1:]]
    ended = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(ended.stdout, end="", flush=True)
    return ended.returncode != 0


def main() -> None:
    """Run every check; end with 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--check", help="one of the names, alone")
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="checks at a time")
    arguments = parser.parse_args()
    cpu = arguments.cpu
    if not cpu and not torch.cuda.is_available():
        sys.exit("there is no GPU here (torch.cuda.is_available() is False): say --cpu to try the script itself")
    found = checks(cpu=cpu)
    if arguments.check:
        sys.exit(_run_check(arguments.check, found[arguments.check]))
    print(f"torch {torch.__version__} on {'the CPU' if cpu else torch.cuda.get_device_name()}", flush=True)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        sys.exit(any([*pool.map(_run_in_process, [name for name in found if re.search(arguments.only, name)])]))


if __name__ == "__main__":
    main()
