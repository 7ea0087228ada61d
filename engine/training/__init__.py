"""The Trainer, its loops, and the parts of a training step.

batch_stream    copies batches to a GPU on a separate CUDA stream, while earlier steps are computed
boundary        the boundary between two batches: takes due snapshots, and handles requests
closures        optimizers whose step needs a closure, such as LBFGS, and what they cannot be combined with
context         the objects that one call of a Trainer uses, complete before its loop starts
determinism     deterministic algorithms of torch, switched on while a fit runs
evaluation      the loops over the batches of an evaluation or a prediction, in a fit or outside
extra_steps     extra steps, which a rank takes only so that collectives of other ranks complete; their effects are
                reverted
finite          checks that losses are finite, before anything that depends on them is written
fit             one fit: builds its context, resumes from a snapshot, and trains to the end
fit_loop        the loop over the epochs and batches of a fit
fit_warnings    warnings on parameters, layers, validations and monitors that take no part in a fit
forward_backward  forward and backward of a training batch, in the way of the strategy
lane_scope      runs one lane of a batch: seeds it, collects what it logs, checks for side effects
losses          finds and checks the loss in the outputs of `training_step`
nonfinite       `on_nan: skip`: leaves out a batch whose loss is not finite
optimizer_step  trains on one batch: forward and backward, then clipping and the optimizer step
reporter        sends events to the launcher, or shows them on the terminal
running_call    the running calls of Trainers, and what other calls may do in their hooks
sample_log      the log of samples: which batches of which epochs reached the training step, over all attempts
                of a run
setup           calls `setup` and `teardown` of data, callbacks and module around a stage
shared_order    checks that samplers of different ranks gave the same order
step_calls      the hooks and other functions that a training batch calls, looked up once in a fit
trainer         the Trainer: builds the context of each call and runs the loops
trainer_state   the attributes and methods of a Trainer that modules, callbacks and launchers use
uneven_ranks    evaluation in lockstep where ranks have different numbers of batches
checkpointing/  the state of a fit, saved in snapshots and restored

Tests: tests/unit/training, tests/laws/test_resume.py, tests/laws/test_lanes.py, tests/laws/test_on_nan.py
"""
