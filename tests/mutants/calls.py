"""Planted bugs of what calls of a Trainer read, return and keep."""

from mutants.mutant import Mutant

__all__ = ["CALLS"]

CALLS = [
    Mutant(
        "predictions are left out where a test is limited",
        "engine/data/resolve.py",
        '"predict": 1.0}',
        '"predict": options.limit_test_batches}',
        "unit/training/test_evaluation.py::test_predictions_are_of_all_batches_whatever_a_test_is_limited_to",
    ),
    Mutant(
        "an evaluation after a fit stands at step 0",
        "engine/training/trainer.py",
        "progress=replace(ready.progress, validating=False)",
        "progress=Progress()",
        "unit/training/test_evaluation.py::test_an_evaluation_stands_where_the_fit_before_it_ended",
    ),
    Mutant(
        "the lanes of a batch are one prediction",
        "engine/training/evaluation.py",
        "[kept] if self.lanes is None else kept.values()",
        "[kept]",
        "unit/training/test_lane_refusals.py::test_lanes_predict_and_test_each_sample_once",
    ),
    Mutant(
        "predictions of several loaders are all in the first list",
        "engine/training/evaluation.py",
        "self.predictions[number] +=",
        "self.predictions[0] +=",
        "unit/lightning/test_adapt.py::test_predictions_of_several_loaders_are_a_list_for_each_as_in_lightning",
    ),
    Mutant(
        "a hook may test with the Trainer of its fit",
        "engine/training/trainer.py",
        "        ensure_not_running(self, module, stage)\n",
        "",
        "unit/training/test_evaluation.py::test_a_call_that_would_take_trainer_or_module_from_a_fit_is_refused",
    ),
    Mutant(
        "another Trainer in a hook begins the fit's random numbers anew",
        "engine/training/running_call.py",
        "    if not _CALLS.get():\n",
        "    if True:\n",
        "unit/training/test_evaluation.py::test_another_trainer_evaluates_a_copy_in_a_fit_which_goes_on_as_it_was",
    ),
    Mutant(
        "the state that a DataModule gives is in no snapshot",
        "engine/training/checkpointing/state_parts.py",
        "*_own_state(context.source)",
        "",
        "unit/training/test_data_state.py",
    ),
    Mutant(
        "hooks of an evaluation find the module in training mode",
        "engine/training/evaluation.py",
        "with torch.no_grad(), context.modes.evaluating():",
        "with torch.no_grad():",
        "unit/lightning/test_hook_order.py::test_hooks_come_as_in_lightning",
    ),
    Mutant(
        "a fit begins with every layer in training mode",
        "engine/training/fit.py",
        "        # Before state is loaded, which overrides",
        "        context.module.train()\n        # Before state is loaded, which overrides",
        "unit/lightning/test_hook_order.py::test_hooks_come_as_in_lightning",
    ),
    Mutant(
        "gradients are gone before on_train_batch_end",
        "engine/training/optimizer_step.py",
        "        self._with_gradients.append(optimizer)\n\n",
        "        self._with_gradients.append(optimizer)\n        self.zero_grad()\n\n",
        "unit/lightning/test_hook_order.py::test_hooks_come_as_in_lightning",
    ),
    Mutant(
        "gradients are added to those of the step before",
        "engine/training/fit_loop.py",
        "        self.optimizer_step.zero_grad()\n",
        "",
        "unit/lightning/test_hook_order.py::test_hooks_come_as_in_lightning",
    ),
    Mutant(
        "batches between validations are counted anew in a resumed attempt",
        "engine/modules/progress.py",
        "return {name: count for name, count in counts.items() if count or name not in _ADDED}",
        "return {name: count for name, count in counts.items() if name not in _ADDED}",
        "laws/test_resume.py::test_every_option_resumes[every fifth batch over epochs]",
    ),
    Mutant(
        "an empty validation calls its hooks",
        "engine/training/fit_loop.py",
        "if validation and is_on else None",
        "if validation else None",
        "unit/lightning/test_hook_order.py::test_hooks_come_as_in_lightning",
    ),
    Mutant(
        "what is logged after the last row is dropped without a word",
        "engine/training/fit_loop.py",
        'begin("train", closed="trained")',
        'begin("train")',
        "unit/training/test_logging_in_hooks.py",
    ),
    Mutant(
        "gradients are clipped before a hook sees them",
        "engine/training/step_calls.py",
        '*bound("on_before_optimizer_step"),\n            *self._clipping(context),\n',
        '*self._clipping(context),\n            *bound("on_before_optimizer_step"),\n',
        "unit/lightning/test_hook_order.py::test_hooks_come_as_in_lightning",
    ),
    Mutant(
        "monitors look at nothing in a fit without a validation",
        "engine/training/fit_loop.py",
        "self._judge_epoch(context.metric_logger.close_epoch())",
        "context.metric_logger.close_epoch()",
        "unit/modules/test_callbacks.py::test_the_best_weights_are_those_of_the_best_value",
    ),
    Mutant(
        "a pipeline reads the batch with which it measures its layers",
        "engine/training/extra_steps.py",
        "    loader.load_state_dict(before)\n",
        "",
        "distributed/test_pipeline.py::test_the_batch_that_layers_are_measured_with_counts_as_not_read",
    ),
    Mutant(
        "what is logged for the progress bar is not told",
        "engine/metrics/logger.py",
        "if name in names and value is not None",
        "if name not in names and value is not None",
        "unit/training/test_reporter.py::test_a_step_is_told_with_what_was_logged_for_the_progress_bar",
    ),
]
