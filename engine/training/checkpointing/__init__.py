"""Checkpointing: what a fit's state consists of, and how it is saved in snapshots and restored.

checkpointer   takes the snapshots of a fit, and resumes from them
identity       changes between two attempts of a run: refused, warned about, or ignored
state_parts    the parts of a fit's state, in the order in which they are restored
rank_warnings  warnings of all ranks, merged and logged by rank 0
replica_check  checks that tensors that a snapshot holds once are the same on all ranks
restore_check  restores every part from its own state, to find early what could not be restored later
roots          the roots of a fit's object graph: its module, callbacks, data, optimizers, schedulers, and
               generators in globals
run_store      the folder of a run as a fit uses it: snapshots, weights, metric log, lease
settings       settings of optimizers and schedulers that a snapshot overrides, and warnings about them
text_order     warns of sets of strings: without PYTHONHASHSEED their order differs in each interpreter
unsaved_state  warns of user state that changes in training and that no snapshot holds
world_size     resuming with another number of ranks: batches are divided anew, states merged
"""
