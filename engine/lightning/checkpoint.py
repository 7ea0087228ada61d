"""Checkpoints in Lightning's format, for its hooks and for `load_from_checkpoint`."""

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from midstride.engine.code_origin import module_of
from midstride.engine.errors import SnapshotMissing
from midstride.engine.modules.module import TrainingModule
from midstride.engine.snapshots.reader import weights_at
from midstride.engine.storage.draft import draft_of

if TYPE_CHECKING:
    from midstride.engine.modules.interface import TrainerInterface

__all__ = ["checkpoint_of", "export_weights", "exported_checkpoint", "exported_path", "remove_exported"]


def checkpoint_of(module: TrainingModule, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries for hooks: counts, `weights` as "state_dict", hyperparameters."""
    found = {"epoch": module.current_epoch, "global_step": module.global_step, "state_dict": dict(weights)}
    found["hyper_parameters"] = dict(module.hparams)
    if name := vars(module).get("_hparams_name"):
        found["hparams_name"] = name
    packages = [module_of(kind).partition(".")[0] for kind in type(module).__mro__]
    for package in {"lightning", "pytorch_lightning"}.intersection(packages):
        found["pytorch-lightning_version"] = sys.modules[package].__version__
    return found


def exported_checkpoint(module: TrainingModule, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint for `load_from_checkpoint`: weights and hyperparameters only."""
    found = checkpoint_of(module, weights)
    module.on_save_checkpoint(found)
    return found


def _file(run: str, folder: str) -> Path:
    return Path(run) / "lightning" / f"{folder}.ckpt"


def exported_path(run: str, folder: str) -> str:
    """Return the path of the file, in Lightning's format, of weights in `folder` of a run.

    Without a file, it is the folder's path.

    Only runs in local folders have such files, at the end of a fit with a ModelCheckpoint of Lightning's.
    """
    file = _file(run, folder)
    return str(file) if "://" not in run and file.is_file() else f"{run}/{folder}"


def remove_exported(trainer: "TrainerInterface") -> None:
    """Remove files of the run's earlier fit, whose weights this fit may replace."""
    if (run := _local_run(trainer)) is not None:
        for folder in ("best", "last"):
            _file(run, folder).unlink(missing_ok=True)


def export_weights(trainer: "TrainerInterface", module: TrainingModule) -> None:
    """Write the weights of a finished run to files for Lightning's ModelCheckpoint."""
    if (run := _local_run(trainer)) is None:
        return
    given = [one for one, _ in trainer.callback_pairs if type(one).__name__ == "ModelCheckpoint"]
    folders = {"best" if one.monitor is not None else "last" for one in given}
    for folder in sorted(folders | {"last" for one in given if one.save_last}):
        with suppress(SnapshotMissing):  # snapshots are off, or nothing was monitored
            weights, file = weights_at(f"{run}/{folder}"), _file(run, folder)
            found = exported_checkpoint(module, weights.state_dict)
            found |= {"epoch": weights.facts["epoch"], "global_step": weights.facts["step"]}
            file.parent.mkdir(exist_ok=True)
            with draft_of(file) as draft:
                torch.save(found, draft)


def _local_run(trainer: "TrainerInterface") -> str | None:
    """Return the run's local folder on rank 0, if a ModelCheckpoint of Lightning's was passed."""
    run = trainer.run_url
    has_any = any(type(one).__name__ == "ModelCheckpoint" for one, _ in trainer.callback_pairs)
    return run if has_any and run is not None and "://" not in run and trainer.is_global_zero else None
