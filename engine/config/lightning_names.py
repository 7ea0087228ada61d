"""Names of Lightning's users, and their counterparts here."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from midstride.engine.errors import JobError

__all__ = [
    "ARGUMENTS_AFTER",
    "ARGUMENT_NAMES",
    "LIGHTNING_ARGUMENTS",
    "LIGHTNING_HOOKS",
    "LIGHTNING_OPTIONS",
    "LIGHTNING_STRATEGIES",
    "LIGHTNING_VALUES",
    "NEUTRAL_ARGUMENTS",
    "NEUTRAL_OPTIONS",
    "REFUSED_BY_LIGHTNING",
    "STRATEGY_ALIASES",
    "trial_options",
    "without_neutral",
]

#: a name that neither the Trainer nor a job knows -> the way out
LIGHTNING_OPTIONS: dict[str, str] = {
    "batch_size": "it is your data's: data_args",
    "barebones": "an undefined hook costs nothing anyway",
    "ckpt_path": "the same run again resumes",
    "default_root_dir": "the folder of a run is snapshots.url of a job, run= of fit",
    "enable_autolog_hparams": "a run keeps its job and save_hyperparameters",
    "enable_checkpointing": "snapshots are taken unless snapshots is null (None)",
    "enable_model_summary": "none is shown",
    "fast_dev_run": "midstride check tries a job, Trainer.check a module; to train a batch, set max_steps=1, "
    "limit_val_batches=1 and snapshots=None",
    "inference_mode": "evaluations run under torch.no_grad()",
    "learning_rate": "it is your module's: module_args",
    "log_every_n_steps": "every logged value is in the run's metrics.csv, a row a step",
    "logger": "set loggers: tensorboard, mlflow, wandb; the run's metrics.csv has a row a step without any",
    "lr": "it is your module's: module_args",
    "model_registry": "nights have champions: set registered_model of the logger mlflow",
    "num_nodes": "set nodes, under world",
    "num_sanity_val_steps": "midstride check tries a job, Trainer.check a module",
    "num_workers": "it is your data's: data_args",
    "plugins": "precision and strategy replace plugins",
    "profiler": "run torch.profiler in a callback",
    "reload_dataloaders_every_n_epochs": "let the sampler or the data set follow set_epoch",
    "resume_from_checkpoint": "the same run again resumes",
    "sync_batchnorm": "it is an argument of ddp: strategy_args={sync_batchnorm: true}",
}

#: an option -> types of values that Lightning takes for it and midstride does not, and the way out
LIGHTNING_VALUES: dict[str, tuple[tuple[type, ...], str]] = {
    "accumulate_grad_batches": (
        (dict,),
        "should be one number for the whole run; for windows that change, use GradientAccumulationScheduler",
    ),
    "deterministic": ((str,), "should be true, or false where an operation has no deterministic form"),
    "val_check_interval": (
        (str, dict, timedelta),
        "should be a number of batches, such as 100, or a share of an epoch, such as 0.5: a clock would decide which "
        "weights are validated",
    ),
}

#: an argument of Lightning's Trainer -> values that ask for nothing, or for what is done here anyway; None: any
NEUTRAL_OPTIONS: dict[str, tuple[object, ...] | None] = {
    "default_root_dir": None,
    "enable_autolog_hparams": None,
    "enable_checkpointing": (None, True),
    "enable_model_summary": None,
    "inference_mode": (True, False),
    "log_every_n_steps": None,
    "logger": (None, True, False),
    "model_registry": (None,),
    "num_sanity_val_steps": None,
    "plugins": (None,),
    "profiler": (None,),
    "reload_dataloaders_every_n_epochs": (0,),
}

#: a name of Lightning's for an argument of fit, validate, test and predict -> its name here
ARGUMENT_NAMES: dict[str, str] = {
    "dataloaders": "data",
    "datamodule": "data",
    "model": "module",
    "train_dataloader": "data",
    "train_dataloaders": "data",
    "val_dataloader": "val_dataloaders",
}

#: a method of the Trainer -> Lightning's arguments after those that both have in the same place
ARGUMENTS_AFTER: dict[str, tuple[str, ...]] = {
    "fit": ("datamodule", "ckpt_path", "weights_only"),
    "predict": ("datamodule", "return_predictions", "ckpt_path", "weights_only"),
    "test": ("ckpt_path", "verbose", "datamodule", "weights_only"),
    "validate": ("ckpt_path", "verbose", "datamodule", "weights_only"),
}

#: an argument of theirs without a counterpart -> values that ask for nothing
NEUTRAL_ARGUMENTS: dict[str, tuple[object, ...]] = {
    "ckpt_path": (None,),
    "verbose": (True, False),
    "weights_only": (None, True, False),
}

#: a name that fit, validate, test and predict do not know -> the way out
LIGHTNING_ARGUMENTS: dict[str, str] = {
    "ckpt_path": "repeating the same run resumes it: pass run",
}


def trial_options(batches: int | bool) -> dict[str, Any]:
    """Return the options that `fast_dev_run=batches` stands for: n batches of each loader, once.

    >>> trial_options(0), trial_options(True)["max_steps"]
    ({}, 1)

    Raises:
        JobError: it is no number of batches.
    """
    if type(batches) not in (bool, int) or batches < 0:
        raise JobError(f"Trainer(...): fast_dev_run: should be True or a number of batches, not {batches!r}")
    if not batches:
        return {}
    count = int(batches)
    limits = dict.fromkeys((f"limit_{stage}_batches" for stage in ("train", "val", "test", "predict")), count)
    every = {"val_check_interval": 1.0, "check_val_every_n_epoch": 1}
    return {"max_epochs": 1, "max_steps": count, "min_epochs": None, "min_steps": None, **limits, **every}


def without_neutral(given: Mapping[str, Any], neutral: Mapping[str, tuple[object, ...] | None]) -> dict[str, Any]:
    """Return the entries of `given` without those whose value is one of `neutral`'s.

    >>> without_neutral({"logger": False, "max_time": "8h"}, NEUTRAL_OPTIONS)
    {'max_time': '8h'}
    """

    def is_neutral(name: str, value: object) -> bool:
        values = neutral.get(name, ())
        return values is None or any(value is one or (type(value) in (int, float) and value == one) for one in values)

    return {name: value for name, value in given.items() if not is_neutral(name, value)}


#: a strategy of Lightning's -> its name here
STRATEGY_ALIASES: dict[str, str] = {
    "ddp_find_unused_parameters_false": "ddp",
    "fsdp": "fully_sharded",
    "single_device": "single",
}

#: a strategy of Lightning's that has no name of its own here -> the way out
LIGHTNING_STRATEGIES: dict[str, str] = {
    "auto": "in a job set single for one process, ddp for several",
    "ddp_find_unused_parameters_true": "use ddp with strategy_args={find_unused_parameters: true}",
    "deepspeed": "use sharded or fully_sharded",
    "deepspeed_stage_2": "use sharded",
    "deepspeed_stage_3": "use fully_sharded",
    "xla_fsdp": "use xla",
}

#: methods that Lightning itself refuses, also in classes of libraries
REFUSED_BY_LIGHTNING = frozenset({"test_epoch_end", "training_epoch_end", "validation_epoch_end"})

_BY_HAND = "set automatic_optimization = False, and do it in training_step"
#: a method that Lightning calls and midstride does not -> the way out
LIGHTNING_HOOKS: dict[str, str] = {
    "configure_sharded_model": "build the layers in __init__ or in setup",
    "on_batch_end": "write on_train_batch_end",
    "on_batch_start": "write on_train_batch_start",
    "on_epoch_end": "write on_train_epoch_end and on_validation_epoch_end",
    "on_epoch_start": "write on_train_epoch_start and on_validation_epoch_start",
    "on_exception": "write it in the module or in a callback",
    "on_load_checkpoint": "write state_dict and load_state_dict",
    "on_sanity_check_end": "nothing is validated before the first step",
    "on_sanity_check_start": "nothing is validated before the first step",
    "on_save_checkpoint": "write state_dict and load_state_dict",
    "on_validation_model_zero_grad": "gradients belong to the current window",
    "tbptt_split_batch": _BY_HAND,
    "test_epoch_end": "write on_test_epoch_end; keep the outputs of test_step in an attribute",
    "training_epoch_end": "write on_train_epoch_end; keep the outputs of training_step in an attribute",
    "validation_epoch_end": "write on_validation_epoch_end; keep the outputs of validation_step in an attribute",
}
