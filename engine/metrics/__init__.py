"""Logged values, from `self.log` to rows of the metric log.

accumulator             a logged value on its way from batches to an epoch, and from ranks to a run
epoch_share             what a rank has of an epoch that ends, and what the ranks make of their shares
lane_logger             what a lane logs is kept apart, and put together in the order of lanes
lane_metrics            the same of what torchmetrics have seen in a lane
log_target              under which names a value is kept that `self.log` is given
logger                  logged values taken batch by batch, reduced over an epoch and over the ranks
metric_log              one row a step, no duplicates, no holes
torchmetrics_internals  privates of torchmetrics, named here alone
torchmetrics_state      torchmetrics inside a module: every rank's own state, and how the ranks put theirs
                        together
values                  values as `self.log` is given them, and the numbers in them

Tests: tests/unit/metrics, tests/distributed/test_step_values.py
"""
