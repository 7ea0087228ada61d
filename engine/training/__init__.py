"""The Trainer, its loops, and the parts of a training step.

batch_transfer  moves batches to the device; to a GPU on a separate CUDA stream, while earlier steps are computed
boundary        the boundary between two batches: takes due snapshots, and handles requests
calls           one call of a Trainer: alone with its module, seeded, set up and torn down
closures        optimizers whose step needs a closure, such as LBFGS, and what they cannot be combined with
context         the objects that one call of a Trainer uses, complete before its loop starts
determinism     deterministic algorithms of torch, switched on while a fit runs
evaluation      validates, tests and predicts: the loops over the batches, in a fit or outside
finite_losses   checks that losses are finite, before anything that depends on them is written
fit             one fit: builds its context, resumes from a snapshot, and trains to the end
fit_loop        the loop over the epochs and batches of a fit
fit_warnings    warnings on parameters, layers, validations and monitors that take no part in a fit
lane_scope      runs one lane of a batch: seeds it, collects what it logs, checks for side effects
losses          finds the loss in the outputs of `training_step`; `on_nan: skip` leaves out one that is not finite
optimizer_step  trains on one batch: forward and backward, then clipping and the optimizer step
reporter        sends events to the launcher, or shows them on the terminal
sample_log      the log of samples: which batches of which epochs reached the training step, over all attempts
                of a run
trainer         the Trainer: fit, validate, test, predict, and what modules and callbacks use of it
checkpointing/  the state of a fit, saved in snapshots and restored

Tests: tests/unit/training, tests/laws/test_resume.py, tests/laws/test_lanes.py, tests/laws/test_on_nan.py
"""
