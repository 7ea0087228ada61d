"""Bugs in the root of the engine: what a step computes, counts, logs and takes back."""

from mutants.mutant import Mutant

__all__ = ["TRAINING"]

MODULES = "laws/test_resume.py::test_every_kind_of_module_resumes"
ENDS = "laws/test_resume.py::test_a_fit_that_ends_with_an_epoch_ends_it_whole"

TRAINING = [
    Mutant(
        "the best value is forgotten",
        "engine/modules/callbacks.py",
        'return {"best": self.best, "best_step": self.best_step}',
        'return {"best": math.inf, "best_step": -1}',
        f"{MODULES}[worse and worse-1]",
    ),
    Mutant(
        "early stopping forgets how long it has waited",
        "engine/modules/callbacks.py",
        'self.best, self.wait_count = state_dict["best"], state_dict["wait_count"]',
        'self.best = state_dict["best"]',
        f"{ENDS}[patience-validation]",
    ),
    Mutant(
        "a tie is better",
        "engine/modules/callbacks.py",
        "return value < self.best - margin if",
        "return value <= self.best - margin if",
        "unit/training/test_trainer.py::test_early_stopping_stops_and_is_finished",
    ),
    Mutant(
        "every epoch has a validation",
        "engine/training/loops.py",
        "if (progress.epoch + 1) % self.context.options.check_val_every_n_epoch:",
        "if progress.epoch < 0:",
        "unit/training/test_trainer.py::test_only_every_nth_epoch_has_validations",
    ),
    Mutant(
        "early stopping waits for no epoch",
        "engine/training/loops.py",
        "(progress.stop and progress.epoch >= (options.min_epochs or 0))",
        "progress.stop",
        "unit/training/test_trainer.py::test_early_stopping_waits_for_the_least_number_of_epochs[7-7]",
    ),
    Mutant(
        "a LightningModule within another is left as it is",
        "engine/lightning/adapt.py",
        "for part in value.modules() if isinstance(value, nn.Module) else [value]:",
        "for part in [value]:",
        "unit/lightning/test_adapt.py::test_what_the_user_wrote_stays_and_nested_modules_are_adapted_too",
    ),
    Mutant(
        "a callback's setup is undone",
        "engine/training/trainer.py",
        """            self.last_fit = None
            try:
                self.is_fitting = True
""",
        """            self.last_fit = None
            self.reset_callbacks()
            try:
                self.is_fitting = True
""",
        "laws/test_lightning.py::test_a_lightning_module_trains_as_it_is[EMA callback]",
    ),
    Mutant(
        "a module's own optimizer_step is not called",
        "engine/training/optimizer_step.py",
        'if (step := self._own.get("optimizer_step")) is None:\n            context.precision.step(optimizer)',
        "if (step := None) is None:\n            context.precision.step(optimizer)",
        "laws/test_lightning.py::test_a_lightning_module_trains_as_it_is[warm-up in optimizer_step]",
    ),
    Mutant(
        "a module's own optimizer_step is not called where the optimizer needs a closure",
        "engine/training/optimizer_step.py",
        "step(context.progress.epoch, context.progress.batch, optimizer, closure)",
        "optimizer.step(closure)",
        "unit/training/test_trainer.py::test_a_step_of_ones_own_has_the_closure",
    ),
    Mutant(
        "data's hooks of a batch's transfer are not called",
        "engine/training/context.py",
        "for owner in (self.trainer.datamodule, self.module):",
        "for owner in (self.module,):",
        "laws/test_lightning.py::test_a_lightning_module_trains_as_it_is[data module]",
    ),
    Mutant(
        "gradients are clipped before they are unscaled",
        "engine/training/optimizer_step.py",
        "        context.precision.unscale(optimizer)\n        self._clip(optimizer)\n",
        "        self._clip(optimizer)\n        context.precision.unscale(optimizer)\n",
        "laws/test_plain.py::test_in_16_bits_gradients_are_clipped_at_their_true_size[1]",
    ),
    Mutant(
        "the loss of a window is not a mean",
        "engine/training/optimizer_step.py",
        "context.precision.backward(loss / self.window if self.window > 1 else loss, by)",
        "context.precision.backward(loss, by)",
        "laws/test_plain.py::test_an_undisturbed_run_has_the_bits_of_the_plain_script[3-0.5-1]",
    ),
    Mutant(
        "the last window of an epoch stays open",
        "engine/training/optimizer_step.py",
        "return (index + 1) % self.window == 0 or self.loader.at_end",
        "return (index + 1) % self.window == 0",
        "laws/test_plain.py::test_an_undisturbed_run_has_the_bits_of_the_plain_script[3-0.5-1]",
    ),
    Mutant(
        "a loss that is not finite goes on",
        "engine/training/finite.py",
        "not math.isfinite(loss.item()):",
        "math.isnan(loss.item()):",
        "unit/training/test_refusals.py::test_is_refused_before_anything_is_written[an infinite loss by hand]",
    ),
    Mutant(
        "the scale is not part of the state",
        "engine/optim/precision.py",
        "            self._scaler.load_state_dict(state_dict)",
        "            pass",
        "laws/test_resume.py::test_every_option_resumes[16 bits]",
    ),
    Mutant(
        "all ranks have the same dropout masks",
        "engine/seeds.py",
        "return mix(seed, rank)",
        "return mix(seed, 0)",
        "unit/data/test_per_sample.py::test_seeds_are_those_of_splitmix64",
    ),
    Mutant(
        "numpy's second gaussian is lost",
        "engine/seeds.py",
        'np.random.set_state(state_dict["numpy"])',
        'np.random.set_state((*state_dict["numpy"][:3], 0, 0.0))',
        "unit/data/test_raw_memory.py::test_the_second_of_two_normal_numbers_that_numpy_draws_at_once_is_kept",
    ),
    Mutant(
        "an added group of parameters is lost",
        "engine/optim/optimizers.py",
        'optimizer.add_param_group({"params": [parameters[name] for name in names]})',
        "pass",
        f"{MODULES}[more to train later-1]",
    ),
    Mutant(
        "an added group of parameters has the weight decay of the others",
        "engine/optim/optimizers.py",
        "            _load(optimizer, state_dict[str(number)])\n",
        "            _load(optimizer, state_dict[str(number)])\n"
        "            for group in optimizer.param_groups:\n"
        '                group["weight_decay"] = optimizer.defaults.get("weight_decay", 0.0)\n',
        f"{MODULES}[more to train later-1]",
    ),
    Mutant(
        "schedulers start over",
        "engine/optim/optimizers.py",
        "config.scheduler.load_state_dict(",
        "dict(",
        f"{MODULES}[plateau-1]",
    ),
    Mutant(
        "a rank that saw nothing counts in a mean of metrics",
        "engine/metrics/torchmetrics_state.py",
        "having = [states for count, states in ranks if count] or [states for _, states in ranks]",
        "having = [states for _, states in ranks]",
        "unit/metrics/test_logger.py::test_a_rank_that_saw_nothing_counts_in_no_mean_and_no_maximum",
    ),
    Mutant(
        "metrics of a collection do not share their sums again",
        "engine/metrics/torchmetrics_internals.py",
        "collection._compute_groups_create_state_ref(copy=copied)",
        "pass",
        "unit/metrics/test_logger.py::test_metrics_that_share_their_sums_share_them_in_the_next_life",
        survives="torchmetrics links the metrics of a group again at the next update",
    ),
    Mutant(
        "a metric keeps the value of what is taken back",
        "engine/metrics/torchmetrics_internals.py",
        "    metric._computed = None\n",
        "",
        "unit/metrics/test_logger.py::test_what_a_metric_saw_is_taken_back_with_the_value_it_kept",
    ),
    Mutant(
        "a metric forgets how often it was updated",
        "engine/metrics/torchmetrics_internals.py",
        "metric._update_count = count",
        "pass",
        f"{MODULES}[torchmetrics-1]",
    ),
    Mutant(
        "a value that was logged before a snapshot is lost",
        "engine/metrics/logger.py",
        'self._running = {name: Accumulator(**running) for name, running in state_dict["running"].items()}',
        "self._running = {}",
        f"{MODULES}[torchmetrics-1]",
    ),
    Mutant(
        "an epoch's mean does not count samples",
        "engine/metrics/logger.py",
        "self._accumulate(wanted, value, float(samples_in(self.batch) if batch_size is None else batch_size))",
        "self._accumulate(wanted, value, 1.0)",
        "unit/metrics/test_logger.py::test_an_epochs_mean_is_weighted_by_samples_and_a_metric_has_a_value_for_each_batch",
    ),
    Mutant(
        "an epoch's values are those of rank 0",
        "engine/metrics/logger.py",
        "reduced = over_ranks([rank[0] for rank in everyone])",
        "reduced = over_ranks([everyone[0][0]])",
        "distributed/test_evaluation.py::test_every_sample_counts_once[sizes1-2-run_ranks-None]",
    ),
    Mutant(
        "a row is written twice",
        "engine/metrics/metric_log.py",
        "rows, self._closed = self._closed, []",
        "rows = self._closed",
        f"{MODULES}[worse and worse-1]",
    ),
    Mutant(
        "a validation starts over",
        "engine/modules/progress.py",
        'state_dict.get(field.name, 0) if field.name == "skipped" else',
        'state_dict.get(field.name, 0) if field.name == "skipped" else 0 if field.name == "val_batch" else',
        "laws/test_resume.py::test_a_validation_goes_on_in_the_batch_and_loader_where_it_was_broken_off[1-0.5]",
    ),
    Mutant(
        "a second signal moves the deadline",
        "engine/session/signals.py",
        "        if self._deadline is None:\n            self._deadline = time",
        "        if True:\n            self._deadline = time",
        "faults/test_requests.py::test_asked_again_a_world_has_no_more_time",
    ),
    Mutant(
        "a superseded world replaces the metric log and run.json",
        "engine/training/checkpointing/run_store.py",
        "                ensure_newest(self.store, self.lease)",
        "                pass",
        "unit/snapshots/test_lease.py::test_a_superseded_run_replaces_nothing_that_others_read",
    ),
    Mutant(
        "a snapshot is fatal after one death",
        "engine/session/attempts.py",
        "if len(numbers) >= 2}",
        "if len(numbers) >= 1}",
        "unit/session/test_attempts.py",
    ),
    Mutant(
        "attempts without progress are not counted",
        "engine/session/attempts.py",
        "            idle += 1\n",
        "            pass\n",
        "unit/session/test_attempts.py",
    ),
    Mutant(
        "the same error at the same step is tried again",
        "engine/session/attempts.py",
        "(before.type, before.step) == (last.type, last.step)",
        "before.step != last.step",
        "unit/session/test_attempts.py",
    ),
    Mutant(
        "an error of the user's does not decide",
        "engine/session/outcome.py",
        'if outcome.kind == "user_error" or outcome.type == SUPERSEDED]',
        "if outcome.type == SUPERSEDED]",
        "unit/session/test_outcome.py",
    ),
    Mutant(
        "waiting for a store is a hang",
        "engine/launch/watchdog.py",
        "if seen != self._seen or any(pulse.phase is Phase.WAITING for pulse in pulses):",
        "if seen != self._seen:",
        "unit/launch/test_watchdog.py",
    ),
    Mutant(
        "a batch that was read again is no fault",
        "engine/runs/audit.py",
        "elif stretch.first < at:",
        "elif stretch.first < at - 1:",
        "unit/runs/test_audit.py",
    ),
    Mutant(
        "metrics of all ranks are given to each of a new world",
        "engine/metrics/torchmetrics_state.py",
        'if rank and metrics[path]["updates"]:',
        "if False:",
        "unit/training/test_world_size.py::test_metrics_and_logged_values_are_counted_once",
    ),
    Mutant(
        "data that were changed are still there",
        "engine/storage/listing.py",
        'return manifest_of(manifest["folder"]) == manifest',
        'return manifest_of(manifest["folder"])["files"] == manifest["files"]',
        "unit/jobs/test_prepare.py",
    ),
    Mutant(
        "the password of a data folder is written down",
        "engine/jobs/prepare.py",
        "if holds_password(url):",
        "if not url:",
        "unit/jobs/test_prepare.py",
    ),
]
