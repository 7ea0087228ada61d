"""The Trainer, its loops, and what they need around each batch.

batch_stream    batches copied to a GPU on a stream of their own, beside the steps that are computed
boundary        what happens between two batches: snapshots that are due, requests to stop
closures        optimizers whose step needs a closure, such as LBFGS, and what they cannot be combined with
context         every object that one call of a Trainer works with, complete before its loop starts
determinism     deterministic algorithms, switched on for as long as a fit runs
evaluation      the loop over the batches of an evaluation, in a fit or outside
extra_steps     steps without effect, which a rank takes only so that collectives of other ranks complete
finite          refuses losses that are NaN or infinite, before anything is written after them
fit             one fit: built, resumed from where the run stands, trained to the end
fit_loop        the loop over the epochs and batches of a fit
fit_warnings    parameters, validations and monitors that look as if they took part in a fit and do not
lane_scope      runs one lane of a batch: seeds it, collects what it logs, checks that it leaves nothing else
losses          finds the loss in what `training_step` returns, and checks it
nonfinite       `on_nan: skip`: leaves out a batch whose loss is not finite
optimizer_step  how a batch becomes part of a step: forward, backward, accumulation, clipping, the optimizers
reporter        tells the launcher what happens; without one, the terminal
running_call    the call of a Trainer that is under way, and what another may do in one of its hooks
sample_log      the log of samples: which batches of which epochs reached the training step, over all attempts
                of a run
setup           calls `setup` and `teardown` of data, callbacks and module
shared_order    checks that samplers of different ranks gave the same order
step_calls      the hooks and other functions that a training batch calls, looked up once in a fit
trainer         puts the parts of a training together and hands them to the loops
trainer_state   the attributes and methods of a Trainer that modules, callbacks and launchers use
uneven_ranks    evaluation in lockstep where ranks have different numbers of batches
checkpointing/  what a fit's state consists of, and how it is saved in snapshots and restored
"""
