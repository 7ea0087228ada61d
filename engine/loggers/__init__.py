"""Loggers send each row of a run's metric log once to TensorBoard, MLflow or W&B. No torch.

Rows are sent when the snapshot that holds them is committed, so no failure takes them back. They are read from the
run's store: rows that a tracker missed while it was away are sent later.

base              `Logger`, the base class, and its arguments
build_logger      builds a logger from its name and arguments
delivery          sends the committed rows of a run to one tracker, in a process of its own
logger_processes  starts such a process for each tracker, beside rank 0
mlflow            MLflow: one run in an experiment, with the best weights as an artifact
tensorboard       TensorBoard: one event file
wandb             Weights & Biases: one run, offline one folder

Tests: tests/unit/loggers, tests/laws/test_loggers.py
"""
