"""What Lightning's users are used to say, and what is said here instead."""

__all__ = ["ARGUMENTS", "HABITS", "HOOKS"]

#: a name that neither the Trainer nor a job knows -> the way out
HABITS: dict[str, str] = {
    "accelerator": "GPUs are taken where there are any, gpus=0 in a Trainer keeps off them",
    "batch_size": "it is your data's: data_args",
    "callbacks": "a job has monitor, for the best weights and early stopping; others need a Trainer of your own",
    "check_val_every_n_epoch": "say val_check_interval, a number of batches or a share of an epoch",
    "ckpt_path": "the same run again resumes",
    "default_root_dir": "a run has its place: snapshots.url of a job, run= of fit",
    "enable_checkpointing": "snapshots are taken unless snapshots is null (None)",
    "fast_dev_run": "midstride check tries a job, Trainer.check a module",
    "gpus": "say processes: each takes a GPU where there are any",
    "learning_rate": "it is your module's: module_args",
    "log_every_n_steps": "every logged value is in the run's metrics.csv, a row a step",
    "logger": "every logged value is in the run's metrics.csv, a row a step",
    "lr": "it is your module's: module_args",
    "num_nodes": "say nodes, under world",
    "num_sanity_val_steps": "midstride check tries a job, Trainer.check a module",
    "num_workers": "it is your data's: data_args",
    "resume_from_checkpoint": "the same run again resumes",
    "sync_batchnorm": "it is an argument of ddp: strategy_args={sync_batchnorm: true}",
}

#: a name that fit, validate, test and predict do not know -> the way out
ARGUMENTS: dict[str, str] = {
    "ckpt_path": "the same run again resumes: say run",
    "dataloaders": "it is data",
    "datamodule": "it is data",
    "model": "it is module",
    "train_dataloader": "it is data",
    "train_dataloaders": "it is data",
    "val_dataloader": "it is val_dataloaders",
}

_BY_HAND = "say automatic_optimization = False, and do it in training_step"
_MOVED = "batches are moved to the device; change them in the step"
#: a method that Lightning calls and midstride does not -> the way out
HOOKS: dict[str, str] = {
    "backward": _BY_HAND,
    "configure_callbacks": "give the Trainer callbacks",
    "configure_gradient_clipping": "say gradient_clip_val, or clip in on_before_optimizer_step",
    "configure_model": "build what trains in __init__, or in setup",
    "configure_sharded_model": "build what trains in __init__, or in setup",
    "lr_scheduler_step": "a scheduler is stepped by interval, frequency and monitor; others " + _BY_HAND,
    "on_after_batch_transfer": _MOVED,
    "on_batch_end": "write on_train_batch_end",
    "on_batch_start": "write on_train_batch_start",
    "on_before_batch_transfer": _MOVED,
    "on_epoch_end": "write on_train_epoch_end and on_validation_epoch_end",
    "on_epoch_start": "write on_train_epoch_start and on_validation_epoch_start",
    "optimizer_step": "a schedule of rates is a scheduler with interval step; for others " + _BY_HAND,
    "optimizer_zero_grad": _BY_HAND,
    "tbptt_split_batch": _BY_HAND,
    "test_epoch_end": "write on_test_epoch_end; keep what test_step returned in an attribute",
    "training_epoch_end": "write on_train_epoch_end; keep what training_step returned in an attribute",
    "transfer_batch_to_device": _MOVED,
    "validation_epoch_end": "write on_validation_epoch_end; keep what validation_step returned in an attribute",
}
