"""The Trainer, its loops, and the parts of a training step.

batch_transfer  moves batches to the device; to a GPU on a separate CUDA stream, while earlier steps are computed
calls           one call of a Trainer: alone with its module, seeded, set up and torn down
closures        optimizers whose step needs a closure, such as LBFGS, and their limits
context         the objects that one call of a Trainer uses, complete before its loop starts
evaluation      validates, tests and predicts: the loops over the batches, in a fit or outside
fit             one fit: builds its context, resumes from a snapshot, and trains to the end
fit_loop        the loop over the epochs and batches of a fit
fit_objects     the objects of a fit as the roots of one graph
fit_state       the state of a fit: its parts, and the facts that each snapshot repeats
fit_warnings    warnings on parameters, layers, validations and monitors that take no part in a fit
lane_scope      runs one lane of a batch: seeds it, collects what it logs, checks for side effects
losses          finds the loss in the outputs of `training_step`; `on_nan: skip` leaves out one that is not finite
operation_trace  digests of each operation of torch, to find one that is not repeatable
optimizer_step  trains on one batch: forward and backward, then clipping and the optimizer step
step_check      steps that are executed twice and compared: `verify_every`
step_replay     follows the plan of a replay: stops at a step, with what happens there
trainer         the Trainer: fit, validate, test, predict, and what modules and callbacks use of it

Tests: tests/unit/training, tests/laws
"""
