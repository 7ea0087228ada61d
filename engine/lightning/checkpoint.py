"""Checkpoints in Lightning's format, for its hooks and for `load_from_checkpoint`."""

import sys
from collections.abc import Mapping
from typing import Any

from midstride.engine.modules.module import TrainingModule

__all__ = ["checkpoint_of", "exported_checkpoint"]


def checkpoint_of(module: TrainingModule, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that the hooks get: "epoch", "global_step", and `weights` as "state_dict"."""
    return {"epoch": module.current_epoch, "global_step": module.global_step, "state_dict": dict(weights)}


def exported_checkpoint(module: TrainingModule, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint for `load_from_checkpoint`: weights and hyperparameters, without optimizers and loops."""
    found = {**checkpoint_of(module, weights), "hyper_parameters": dict(module.hparams)}
    if name := vars(module).get("_hparams_name"):
        found["hparams_name"] = name
    packages = [kind.__module__.partition(".")[0] for kind in type(module).__mro__]
    for package in {"lightning", "pytorch_lightning"}.intersection(packages):
        found["pytorch-lightning_version"] = sys.modules[package].__version__
    module.on_save_checkpoint(found)
    return found
