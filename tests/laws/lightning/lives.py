"""Lives of Lightning's modules: under its Trainer, under midstride's, and killed on the way. Called in a fork."""

import importlib
import json
import os
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from midstride.engine import Trainer
from midstride.engine.fault_injection import FaultPlan
from midstride.engine.processes.child_processes import ChildProcesses
from midstride.engine.session.replay_plan import NEVER

#: where each run dies: once in a step, once in an epoch's end
DEATHS = ((4, "fetch"), (6, "epoch_end"))


def live_all(folder: Path) -> None:
    """Give every module of the table its lives; what came of each goes to a file of its name."""
    warnings.simplefilter("ignore")
    from laws.lightning.table import ROWS

    for name in ROWS:
        told: dict[str, Any] = {}
        try:
            told = lives_of(ROWS[name], folder / name)
        except BaseException:
            told["error"] = traceback.format_exc()
        (folder / f"{name}.json").write_text(json.dumps(told))


def lives_of(row: Any, folder: Path) -> dict[str, Any]:
    """Return what came of one module: whether it ends as under Lightning, and how each of its lives ended."""
    folder.mkdir()
    theirs, ours = lightning_weights(row, folder), midstride_weights(row, folder / "undisturbed", NEVER)
    differing = [key for key in theirs | ours if key not in ours or not _equal(theirs[key], ours[key])]
    plan = FaultPlan(folder / "plan")
    for step, phase in DEATHS:
        plan.add("kill", step=step, phase=phase)
    codes = [life(plan, midstride_weights, row, folder / "run") for _ in range(len(DEATHS) + 1)]
    plan.assert_all_fired()
    return {"differing": differing, "draws": row.draws, "codes": codes}


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):  # which a class adds to its state_dict
        return bool(one == other)
    if hasattr(one, "__tensor_flatten__"):  # of a library's own class, made of plain ones
        return all(_equal(getattr(one, part), getattr(other, part)) for part in one.__tensor_flatten__()[0])
    return torch.equal(one, other)


def lightning_weights(row: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights after Lightning's own fit, which keeps its checkpoints in `folder`."""
    module, data, callbacks = row.made()
    roots = (kind.__module__.partition(".")[0] for kind in type(module).__mro__)
    lightning = importlib.import_module(next(root for root in roots if root in ("lightning", "pytorch_lightning")))
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger"), False)
    keeps = any(type(callback).__name__ == "ModelCheckpoint" for callback in callbacks)
    logs = [callback for callback in callbacks if type(callback).__name__ != "LearningRateMonitor"]  # needs a logger
    options = {"max_epochs": 2, "accelerator": "cpu", "num_sanity_val_steps": 0, **quiet, **row.options}
    options["default_root_dir"] = folder
    trainer = lightning.Trainer(callbacks=logs, enable_checkpointing=keeps, **options)
    trainer.fit(module, data.get("train"), data.get("val"), data.get("data"))
    return module.state_dict()


def midstride_weights(row: Any, run: Path, every_steps: int = 1) -> dict[str, torch.Tensor]:
    """Return the weights after midstride's, from wherever `run` stands."""
    module, data, callbacks = row.made()
    options = {"strategy": "single", "max_epochs": 2, "snapshots": {"every_steps": every_steps}, **row.options}
    trainer = Trainer(seed=3, callbacks=callbacks, enable_progress_bar=False, **options)
    trainer.fit(module, data.get("data", data.get("train")), data.get("val"), run=run)
    return module.state_dict()


def life(plan: FaultPlan, train: Callable[..., object], *arguments: Any) -> int:
    """Train in a fork under `plan`; return how it ended."""
    with ChildProcesses(train, arguments, [{**os.environ, **plan.environment}]) as process:
        while process.running():
            process.wait(60.0)
    return process.exit_codes()[0] or 0


def train_on_two(run: str) -> None:
    """Train a module and its data on this rank of two."""
    warnings.simplefilter("ignore")
    from laws.lightning import beside, style

    trainer = Trainer(max_epochs=1, strategy="ddp", enable_progress_bar=False)
    trainer.fit(style.Classifier(), beside.Parts(), run=run)
