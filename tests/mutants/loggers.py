"""Bugs in loggers: rows that a tracker has twice, or never, or that the run has no more."""

from mutants.mutant import Mutant

__all__ = ["LOGGERS"]

DEATHS = "laws/test_loggers.py::test_a_tracker_holds_the_rows_of_the_run_after_many_deaths"

LOGGERS = [
    Mutant(
        "what a death left of an event is kept",
        "engine/loggers/tensorboard.py",
        "os.truncate(newest, good)  # what a death left of a record",
        "pass",
        f"{DEATHS}[tensorboard-1]",
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
]
