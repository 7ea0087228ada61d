"""Logged values, from `self.log` to rows of the metric log.

accumulator             one logged value, reduced over the batches of an epoch and over the ranks
lane_logger             a logger that keeps the values of each lane apart
lane_metrics            the states of torchmetrics, kept apart for each lane
logger                  collects values batch by batch, and reduces them over an epoch and over the ranks
metric_log              one row a step, no duplicates, no holes
torchmetrics_internals  private names of torchmetrics, used here alone
torchmetrics_state      torchmetrics inside a module: the state of each rank, and its reduction over the ranks
values                  the numbers in logged values

Tests: tests/unit/metrics, tests/distributed/test_step_values.py
"""
