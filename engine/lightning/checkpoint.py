"""A checkpoint of Lightning's: what its hooks are shown of one, and what its classes load from a file."""

import sys
from collections.abc import Mapping
from typing import Any

from midstride.engine.modules.module import TrainingModule

__all__ = ["checkpoint_of", "exported_checkpoint"]


def checkpoint_of(module: TrainingModule, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return what every checkpoint of Lightning's has."""
    return {"epoch": module.current_epoch, "global_step": module.global_step, "state_dict": dict(weights)}


def exported_checkpoint(module: TrainingModule, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `load_from_checkpoint` of a LightningModule reads: no optimizers, and nothing to resume from."""
    found = {**checkpoint_of(module, weights), "hyper_parameters": dict(module.hparams)}
    if name := vars(module).get("_hparams_name"):
        found["hparams_name"] = name
    packages = [kind.__module__.partition(".")[0] for kind in type(module).__mro__]
    for package in {"lightning", "pytorch_lightning"}.intersection(packages):
        found["pytorch-lightning_version"] = sys.modules[package].__version__
    module.on_save_checkpoint(found)
    return found
