"""Loggers: a run's metric log in TensorBoard, MLflow and W&B, each row once, whatever dies. Needs no torch.

Rows are sent when the snapshot that holds them is committed: no death takes them back. The run's store is the outbox,
so nothing is kept beside it, and a tracker that is away is sent later what it missed.

base         what a logger is, and what it is given
build        from a logger's name and arguments to the logger
delivery     the committed rows of a run on their way to one tracker
mlflow       MLflow: one run in an experiment, with the best weights as an artifact
process      processes beside rank 0, each of which delivers to one tracker
tensorboard  TensorBoard: one event file
unsent_rows  what is said of a tracker that does not have all rows of a run
wandb        Weights & Biases: one run, offline one folder

Tests: tests/unit/loggers, tests/laws/test_loggers.py
"""
