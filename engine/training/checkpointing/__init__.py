"""Checkpointing: what a fit's state consists of, and how it is saved in snapshots and restored.

checkpointer   takes the snapshots of a fit, and resumes from them
data_changes   whether training changes its data in the middle of an epoch, where no snapshot could be resumed
facts          what manifests record of a fit: the run's identity, and what belongs to its weights
identity       what may change between two attempts of a run: refused, warned about, or free
state_parts    the parts of a fit's state, in the order in which they are restored
rank_warnings  warnings of all ranks, merged and logged by rank 0
replica_check  whether tensors that a snapshot holds once are the same on all ranks
restore_check  restores every part from its own state, to find early what could not be restored later
roots          where a fit's objects are found: its module, callbacks, data, optimizers, schedulers, and
               generators in globals
run_store      one run's folder as a fit uses it: snapshots, weights, metric log, lease
settings       settings of optimizers and schedulers that a snapshot overrides, and warnings about them
sources        digests of the user's source code, to warn when it has changed
text_order     warns of sets of strings: without PYTHONHASHSEED their order differs in each interpreter
unsaved_state  warns of user state that changes in training and that no snapshot holds
world_size     resuming with another number of ranks: batches are cut anew, states put together
"""
