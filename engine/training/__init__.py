"""The loop, and what stands around it.

batch_stream    batches come to a GPU on a stream of their own, while steps before them are computed
boundary        the boundary of a step: what is done between two batches, where everything that decides the
                rest is in the parts
closures        optimizers that evaluate a batch several times in one step, such as LBFGS: what they need, and
                what they exclude
context         what one call of a Trainer works with: made whole before its loop starts, and set from nowhere
                else
determinism     repeatable algorithms, for as long as a fit runs
evaluation      what `Trainer.validate`, `test` and `predict` do once module and ranks are ready
extra_steps     steps that a rank takes only so that other ranks can take theirs: nothing of them stays
finite          losses that have to be finite: refused before anything is written after them
fit             one fit: its parts put together, resumed from where the run stands, trained to the end
fit_warnings    what looks as if it took part in a fit and does not: parameters, validations, monitors
lane_scope      what surrounds a lane of a batch: its random numbers, what it logs, and that it leaves nothing
                else behind
loops           training and evaluation, a page each
losses          what `training_step` returns, read and checked, and steps that return none
nonfinite       `on_nan: skip`: a step that is not finite leaves nothing behind
optimizer_step  how a batch becomes part of a step: forward, backward, accumulation, clipping, the optimizers
reporter        tells the launcher what happens; where there is none, the person at the terminal
sample_log      the log of samples: which batches of which epochs reached the training step, over all attempts
                of a run
setup           what is set up before a stage, and taken down after it: the data and the module
shared_order    whether ranks that share what their samplers give were given the same
step_calls      what is called at the points of a training batch, found once in a fit
trainer         puts the parts of a training together and hands them to the loops
trainer_state   what a Trainer is between its calls and during them, as modules, callbacks and other processes
                see it
uneven_ranks    evaluation batch by batch, as often as the rank that has the most batches
checkpointing/  what a fit's state consists of, and how it goes to snapshots and comes back
"""
