"""Bugs in loggers: rows that a tracker has twice, or never, or that the run has no more."""

from mutants.mutant import Mutant

__all__ = ["LOGGERS"]

DEATHS = "laws/test_loggers.py::test_a_tracker_holds_the_rows_of_the_run_after_many_deaths"

HYPERPARAMETERS = "laws/test_loggers.py::test_hyperparameters_reach_every_tracker_once_whatever_dies"
SILENT = "laws/test_loggers.py::test_a_logger_that_cannot_say_it_is_said_to_miss_rows"
LATER = "laws/test_loggers.py::test_hyperparameters_of_a_later_step_are_told_when_its_snapshot_is_committed"
VALUES = "unit/lightning/test_logged_values.py"

LOGGERS = [
    Mutant(
        "hyperparameters that are logged in training reach no tracker",
        "engine/loggers/delivery.py",
        "if newest and self._is_open and logged_run(self._store, newest) != self._run:",
        "if False:",
        LATER,
    ),
    Mutant(
        "hyperparameters that were logged before a death are lost",
        "engine/training/checkpointing/checkpointer.py",
        'logged.hparams.update({**facts.get("hparams", {}), **logged.hparams})',
        "pass",
        HYPERPARAMETERS,
    ),
    Mutant(
        "an event file keeps the hyperparameters that it was begun with",
        "engine/loggers/tensorboard.py",
        'elif event.HasField("summary") and event.summary != hyperparameters:',
        "elif False:",
        LATER,
    ),
    Mutant(
        "what a death left of an event is kept",
        "engine/loggers/tensorboard.py",
        "os.truncate(newest, good)  # what a death left of a record",
        "pass",
        "unit/loggers/test_tensorboard.py",
    ),
    Mutant(
        "half of an event, which is all that a full disk takes, counts as sent",
        "engine/loggers/tensorboard.py",
        "while left and self._file is not None:",
        "if left and self._file is not None:",
        "unit/loggers/test_tensorboard.py",
    ),
    Mutant(
        "the events of another run of the same name are removed",
        "engine/loggers/tensorboard.py",
        'noted["run_id"] != run.run_id and noted["url"] != run.url:',
        "False:",
        "unit/loggers/test_tensorboard.py",
    ),
    Mutant(
        "runs of one name are one to W&B",
        "engine/loggers/wandb.py",
        'return f"{run.name}-{(run.run_id or xxhash.xxh3_64_hexdigest(run.url.encode()))[:8]}"',
        "return run.name",
        "laws/test_loggers.py::test_runs_of_one_name_and_two_places_have_each_their_own",
    ),
    Mutant(
        "an MLflow run with rows that the run has no more is gone on with",
        "engine/loggers/mlflow.py",
        "if seen != sent or (digest and self._digest.hexdigest() != digest):",
        "if seen != sent:",
        f"{DEATHS}[mlflow-1]",
    ),
    Mutant(
        "MLflow is not asked where it stands",
        "engine/loggers/mlflow.py",
        "sent = max((metric.step for metric in history), default=0)",
        "sent = 0",
        f"{DEATHS}[mlflow-1]",
    ),
    Mutant(
        "an offline folder of an earlier life stays",
        "engine/loggers/wandb.py",
        "shutil.rmtree(earlier)",
        "pass",
        f"{DEATHS}[wandb-1]",
    ),
    Mutant(
        "the end of the training does not send what is left",
        "engine/loggers/delivery.py",
        '"""Send what is left, then the best weights, and tell the tracker that the run is over."""\n'
        "        self.deliver()\n",
        '"""Send what is left, then the best weights, and tell the tracker that the run is over."""\n',
        f"{DEATHS}[tensorboard-1]",
    ),
    Mutant(
        "what a validation logs where no row is open is lost",
        "engine/metrics/metric_log.py",
        "            self.set_next(name, value)\n\n    def close",
        "            pass\n\n    def close",
        "unit/metrics/test_logger.py::test_what_a_validation_logs_where_no_row_is_open_stands_in_the_next_one",
    ),
    Mutant(
        "a name with dollars is taken for a formula, and no curves are drawn",
        "engine/runs/curves.py",
        'rc_context({"text.parse_math": False})',
        "rc_context({})",
        "unit/runs/test_curves.py::test_names_are_drawn_as_they_are",
    ),
    Mutant(
        "curves that cannot be drawn end a run that is done",
        "engine/runs/publication.py",
        "except Exception as error:",
        "except KeyError as error:",
        "unit/runs/test_curves.py::test_curves_that_cannot_be_drawn_are_told_of",
    ),
    Mutant(
        "a metric that stands in a dict is said to be lost",
        "engine/objects/container_writers.py",
        "property, inspect.Signature, RemovableHandle)",
        "property, RemovableHandle)",
        "laws/test_objects.py::test_a_resumed_life_has_what_the_life_before_had[MeasuresInDict]",
    ),
    Mutant(
        "the champion is a version of another experiment's run",
        "engine/jobs/publish.py",
        "[options.in_project(job.name) for options in job.loggers]",
        "job.loggers",
        "laws/test_loggers.py::test_the_champion_is_the_version_in_charge_of_a_registered_model",
    ),
    Mutant(
        "a logger whose process ends by itself goes unnoticed",
        "engine/loggers/process.py",
        "elif process.returncode not in (0, UNSENT_EXIT_CODE):",
        "elif process.returncode < 0:",
        f"{SILENT}[exits-its process ended with 1]",
    ),
    Mutant(
        "a logger that hangs goes unnoticed",
        "engine/loggers/process.py",
        "            if not end_within(process, options.wait_s + _GRACE_S):\n",
        "            if not end_within(process, options.wait_s + _GRACE_S) and False:\n",
        f"{SILENT}[hangs-it hung for 0.1 s]",
    ),
    Mutant(
        "what is logged for step and epoch has no value of its name until the epoch ends",
        "engine/metrics/logger.py",
        "if key in self.common_names:",
        "if False:",
        f"{VALUES}::test_every_hook_finds_the_values_that_it_finds_in_lightning[for step and epoch]",
    ),
    Mutant(
        "a resumed attempt does not know what was for the progress bar",
        "engine/metrics/logger.py",
        'self.progress_bar_names, self.common_names = {*names["progress_bar"]}, dict(names["common"])',
        'self.common_names = dict(names["common"])',
        f"{VALUES}::test_a_resumed_attempt_finds_the_same_values",
    ),
    Mutant(
        "on several ranks nobody knows what the newest step logged",
        "engine/metrics/logger.py",
        "        if self._size > 1:\n            self._of_steps",
        "        if False:\n            self._of_steps",
        "distributed/test_step_values.py",
    ),
    Mutant(
        "a validation after every batch is one after the epoch",
        "engine/modules/monitors.py",
        "isinstance(interval, float) and interval == 1.0",
        "interval == 1.0",
        "unit/modules/test_callbacks.py::test_a_monitor_looks_after_validations_or_as_epochs_end",
    ),
]
